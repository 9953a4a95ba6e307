"""A kernel that has not passed the GPU tests does not pass here either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuflash.runtime import source

RECORD = Path(__file__).parent / "gpu_record.json"
RERUN = "run `python -m pytest -m gpu --gpu-record tests/gpu_record.json` on a GPU, and commit it"


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def test_the_recorded_run_passed() -> None:
    counts = recorded()["counts"]
    assert counts["passed"] > 0, RERUN
    assert counts["failed"] == counts["error"] == 0, RERUN


def test_the_sources_are_those_that_passed() -> None:
    hashes = source.hashes()
    assert hashes, "no CUDA sources found"
    recorded_hashes = recorded()["cuda_src"]
    changed = sorted(
        name
        for name in hashes.keys() | recorded_hashes.keys()
        if hashes.get(name) != recorded_hashes.get(name)
    )
    assert not changed, f"changed since the GPU tests passed: {', '.join(changed)}; {RERUN}"


def test_the_record_says_where_it_was_made() -> None:
    record = recorded()
    for field in ("device", "cuda", "cupy", "numpy", "python", "cuflash"):
        assert record[field], field
