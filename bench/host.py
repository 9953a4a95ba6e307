"""`python -m bench host`: what the host needs to queue one warm call."""

from __future__ import annotations

import argparse
import random
from typing import Any

from . import options, race, stats
from .peers.host_calls import KINDS
from .processes import PREPARE_S, WINDOW_S, Failed, Spec
from .session import Session
from .shapes import Problem

# So small that the device keeps up.
PROBLEM = Problem(1, 2, 2, 64, 64, 64, causal=True)
ROUNDS, CALLS = 41, 100


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    options.add_bench(
        commands,
        "host",
        run,
        "what the host needs to queue one warm call, beside torch and bare CuPy launches",
        "python -m bench host",
    )


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say: their windows are of no use here."""
    measure(run_)


def measure(run_: Session, rounds: int = ROUNDS) -> None:
    """Rounds of `CALLS` calls of each kind, the device idle before each, in an order of their own:
    what else the host does slows all of them.
    """
    if not run_.needs_gpu("host"):
        return
    specs = {kind: Spec("bench.peers.host_calls", options={"kind": kind}) for kind in KINDS}
    rows = []
    with run_.team(specs) as team:
        column: dict[str, dict[str, Any]] = {kind: {} for kind in specs}
        running = team.present(specs)
        for kind, process in list(running.items()):
            try:
                process.ask("prepare", PREPARE_S, problem=PROBLEM.to_dict(), seed=1)
                process.ask("host", WINDOW_S, calls=CALLS)
            except Failed as failure:
                run_.results.skip(f"host: {kind}", str(failure))
                del running[kind]
        times = race.take_turns(
            running,
            lambda kind: float(running[kind].ask("host", WINDOW_S, calls=CALLS)),
            race.Pace(rounds=rounds),
            random.Random(1),
            team,
            column,
        )
    print("\nhost time of a call, us")
    for kind, found in times.items():
        if not found or "failed" in column[kind]:
            run_.results.skip(f"host: {kind}", column[kind].get("failed", "no time"))
            continue
        middle, spread = stats.median_and_spread(found)
        rows.append({"call": kind, "us": middle, "spread": spread, "rounds": len(found)})
        print(f"{middle:8.1f} +- {spread:.1%}  {kind}", flush=True)
    run_.results.add("host", rows)
