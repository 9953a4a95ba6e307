"""`python -m bench io`: bytes to and from main memory as Nsight Compute counts them, beside what
`io_bytes` predicts.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import cuflash

from . import columns, options
from .io_target import EVICT, MARK
from .processes import environment, tidy
from .session import Session
from .shapes import HIDDEN, TOKENS, Problem

_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_SEQS = (512, 1024, 2048, 4096, 8192, 16384)
_DIM = 64
_TIMEOUT_S = 400.0
_KERNELS = {columns.OURS: "auto", "standard": "standard"}


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "io",
        run,
        "bytes to and from main memory, measured by Nsight Compute beside the prediction",
        "python -m bench io",
        "python -m bench io --seqs 2048 --json io.json",
    )
    command.add_argument(
        "--seqs", type=options.numbers, default=_SEQS, metavar="N[,N]",
        help=f"divisors of {TOKENS:,}; default: {','.join(map(str, _SEQS))}",
    )  # fmt: skip


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    for seq in chosen.seqs:
        if TOKENS % seq:
            raise ValueError(f"--seqs: got {seq}; expected divisors of {TOKENS:,}")
    measure(run_, chosen.seqs)


def measure(run_: Session, seqs: Sequence[int] = _SEQS) -> None:
    """Profile every length by our kernel and by standard attention, in one process."""
    if not run_.needs_gpu("io"):
        return
    tool = shutil.which("ncu")
    if tool is None:
        run_.results.skip("io", "needs Nsight Compute's ncu on the path")
        return
    heads = HIDDEN // _DIM
    cases = [
        (name, Problem(TOKENS // seq, heads, heads, seq, seq, _DIM))
        for seq in seqs
        for name in _KERNELS
    ]
    try:
        measured = _profile(tool, cases)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        run_.results.skip("io", tidy(str(error)))
        return
    rows: list[dict[str, Any]] = [
        {
            "column": name, "seq": problem.kv_len, "measured": measured[number],
            "predicted": predicted(problem, name), "problem": problem.to_dict(),
        }
        for number, (name, problem) in enumerate(cases)
        if number in measured
    ]  # fmt: skip
    print(f"\n{'io':<12}{'seq':>8} {'GB':>8} {'predicted':>10} {'difference':>11}")
    for row in rows:
        gb, expected = row["measured"] / 1e9, row["predicted"] / 1e9
        print(
            f"{row['column']:<12}{row['seq']:>8} {gb:>8.3f} {expected:>10.3f} "
            f"{gb / expected - 1:>+11.1%}"
        )
    if len(rows) < len(cases):
        run_.results.skip("io", f"{len(cases) - len(rows)} of {len(cases)} cases have no counts")
    run_.results.add("io", rows)


def predicted(problem: Problem, name: str) -> float:
    """Bytes that `io_bytes` predicts. Our standard attention stores scores of 4 bytes and weights
    of 2: the mean of what both would take for all.
    """
    found = [
        cuflash.io_bytes(problem.q_shape, dtype=problem.dtype, score_dtype=dtype)
        for dtype in ("float32", problem.dtype)
    ]
    if name == "standard":
        return sum(one.standard.total for one in found) / len(found)
    return float(found[0].tiled.total)


def _profile(tool: str, cases: Sequence[tuple[str, Problem]]) -> dict[int, int]:
    listed = [{"kernel": _KERNELS[name], "problem": problem.to_dict()} for name, problem in cases]
    done = subprocess.run(
        [
            *(tool, "--csv", "--page", "raw", "--print-units", "base"),
            *("--metrics", f"{_READ},{_WRITTEN}", "--profile-from-start", "off"),
            *("--clock-control", "none", "--cache-control", "none"),
            *(sys.executable, "-m", "bench.io_target", json.dumps(listed)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
        env=environment(),
    )
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        raise ValueError(said[0] if said else f"ncu ended with status {done.returncode}")
    return bytes_of_cases(done.stdout)


def bytes_of_cases(output: str) -> dict[int, int]:
    """Bytes of each case by its number, from what ncu prints as CSV.

    Of the kernel that empties the cache, what it writes belongs to the case, and what it reads is
    its own.

    Raises
    ------
    ValueError
        Where there is no table, or no case in it.
    """
    lines = output.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise ValueError("ncu printed no table")
    found: dict[int, int] = {}
    case = None
    for row in csv.DictReader(lines[head:]):
        if not (row["ID"] or "").strip().isdecimal():
            continue  # the row of units
        name = row["Kernel Name"]
        if mark := re.search(rf"{MARK}(\d+)", name):
            case = int(mark[1])
            found[case] = 0
        elif case is not None:
            found[case] += _number(row[_WRITTEN])
            if EVICT not in name:
                found[case] += _number(row[_READ])
    if not found:
        raise ValueError("ncu counted nothing")
    return found


def _number(text: str) -> int:
    return round(float(text.replace(",", "")))
