"""The JSON file of a run: what was measured, on what, and what was left out."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cuflash
from cuflash.runtime import source

FORMAT = 1
ROOT = Path(__file__).resolve().parent.parent
_BOARD = ("driver_version", "power.limit", "clocks.max.sm", "clocks.sm", "temperature.gpu")


class Results:
    """A run's record: `data` is what the file has."""

    def __init__(self, command: Sequence[str]) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "command": " ".join(("python -m bench", *command)),
            "date": now.strftime("%Y-%m-%d %H:%M UTC"),
            "commit": _commit(),
            "cuda_sources": _source_hash(),
            "environment": _environment(),
            "board": _board(),
            "versions": {},
            "ceilings": {},
            "benches": {},
            "skipped": [],
        }

    def add(self, bench: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of a bench, after those that it has."""
        self.data["benches"].setdefault(bench, []).extend(rows)

    def skip(self, what: str, why: str) -> None:
        """Note, and say, what was not measured."""
        line = f"{what}: {why}"
        if line not in self.data["skipped"]:
            self.data["skipped"].append(line)
            print(f"skipped  {line}", flush=True)

    def save(self, path: Path) -> None:
        """Write the file, and the folder that it is in."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises
    ------
    ValueError
        Naming the file, where it is no record of this format.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path}: not a record of format {FORMAT}, as python -m bench writes it")
    return record


def _environment() -> dict[str, Any]:
    """Versions and devices, without the folders of this machine."""
    found = cuflash.info()
    shown = ("cuflash", "python", "numpy", "blas", "cupy", "cuda")
    return {name: getattr(found, name) for name in shown} | {"devices": [*map(str, found.devices)]}


def _commit() -> str:
    """Of the tree, with a + where it has changed since; empty where there is no history."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit, changes = (
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
        return commit + ("+" if changes else "")
    return ""


def _source_hash() -> str:
    """Of all CUDA sources, which `tests/gpu_record.json` has one by one."""
    return hashlib.sha256(json.dumps(source.hashes()).encode()).hexdigest()[:16]


def _board() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty where there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_BOARD)}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_BOARD):
            return dict(zip(_BOARD, values, strict=True))
    return {}
