"""`python -m bench all`: every bench, within a budget of time that each has its part of."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from . import (
    backward,
    columns,
    compile_time,
    forward,
    fp8,
    host,
    io,
    memory,
    options,
    quantize,
    static,
)
from .race import Pace
from .session import Session
from .shapes import select

_PACE = Pace(rounds=4, settle_ms=30.0, window_ms=12.0, patience_s=3.0)
_SLOW_TO_PREPARE = "fa4"  # compiles for each kind of problem
_LISTS = ("paper", "gqa", "decode", "long", "cross", "short")
_LONGEST = 1 << 18  # keys: 2^20 take some peers 10 s a call, and ours are in `memory`


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "all",
        run,
        "every bench, within a budget of time; says what it left out",
        "python -m bench all --json bench/results/h200.json --budget 480",
    )
    command.set_defaults(
        rounds=_PACE.rounds, settle_ms=_PACE.settle_ms, window_ms=_PACE.window_ms, budget=480.0
    )
    options.add_kernel(command)
    options.add_peers(command, (*columns.PEERS, *columns.CPU_PEERS))


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    run_.pace = replace(run_.pace, patience_s=_PACE.patience_s)
    run_steps(run_, steps(run_, options.peers_of(chosen)), chosen.budget)


def steps(
    run_: Session, peers: Sequence[str] | None
) -> list[tuple[str, float, Callable[[], None]]]:
    """Of each bench its name, its part of the budget, and how to run it; what matters comes first.

    Parts are what an H200 takes, in seconds.
    """
    if run_.place == "cpu":
        lists = [("cpu", select("cpu"))]
    else:
        lists = [(name, [p for p in select(name) if p.kv_len <= _LONGEST]) for name in _LISTS]
        run_.results.skip(
            f"forward: more than {_LONGEST:,} keys", "10 s a call; --list long has them measured"
        )
        lists.append(("paper", select("paper", dims=(128,), dtypes=("bfloat16",))))
        if peers is None:
            peers = [name for name in columns.PEERS if name != _SLOW_TO_PREPARE]
            run_.results.skip(_SLOW_TO_PREPARE, "compiles for too long; --peers has it measured")
    recipes = columns.RECIPES[:2]
    gradients = select("paper", seqs=(1024, 4096, 16384))
    return [
        ("host", 15, lambda: host.measure(run_, rounds=21)),
        ("forward", 200, lambda: forward.measure(run_, lists, peers)),
        ("backward", 65, lambda: backward.measure(run_, [("paper", gradients)])),
        ("fp8", 45, lambda: fp8.measure(run_, select("fp8"), recipes)),
        ("quantize", 35, lambda: quantize.measure(run_, select("fp8"), recipes)),
        ("memory", 25, lambda: memory.measure(run_)),
        ("io", 25, lambda: io.measure(run_)),
        ("static", 15, lambda: static.measure(run_)),
        ("compile", 45, lambda: compile_time.measure(run_)),
    ]


def run_steps(
    run_: Session, planned: Sequence[tuple[str, float, Callable[[], None]]], budget: float
) -> None:
    """Run each until its part, and what those before left of theirs, is over. One that fails costs
    itself.
    """
    whole = sum(part for _, part, _ in planned)
    end = 0.0
    for name, part, step in planned:
        end += budget * part / whole
        run_.deadline = run_.started + end
        if run_.is_late:
            run_.results.skip(name, "out of time")
            continue
        begin = time.monotonic()
        try:
            step()
        except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
            run_.results.skip(name, f"failed: {error}")
            run_.faults.append(f"{name}: {error}")
        print(f"{name} took {time.monotonic() - begin:.0f} s", flush=True)
