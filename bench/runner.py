"""Runs one bench as a command: a session, the result file, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cuflash

from .race import Pace
from .results import Results
from .session import Session


def run_bench(chosen: argparse.Namespace) -> int:
    """Measure in a session, write the file, and tell what was left out; 1 where ours failed."""
    results = Results(_without_file(chosen.words))
    pace = Pace(chosen.rounds, chosen.settle_ms, chosen.window_ms)
    session = Session(
        results, pace, kernel=chosen.kernel, against=chosen.against, budget_s=chosen.budget
    )
    print(cuflash.info())
    try:
        chosen.bench(session, chosen)
    finally:  # what was measured before an interrupt is kept
        if chosen.json is not None:
            results.save(chosen.json)
            print(f"\nwritten to {chosen.json}")
    if results.data["skipped"]:
        print("\nskipped:", *results.data["skipped"], sep="\n  ")
    for fault in session.faults:
        print(f"FAULT  {fault}", file=sys.stderr)
    return 1 if session.faults else 0


def _without_file(words: Sequence[str]) -> list[str]:
    """The command without where its results go."""
    kept = list(words)
    for place, word in enumerate(words):
        if word == "--json":
            kept[place : place + 2] = []
            break
        if word.startswith("--json="):
            del kept[place]
            break
    return kept
