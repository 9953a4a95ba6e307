"""`python -m bench backward`: gradients of attention of 16 bits beside torch's backends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import columns, options, session
from .session import Session
from .shapes import LISTS, Problem

_DTYPES = ("float16", "bfloat16")


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "backward",
        run,
        "gradients of attention beside torch's backends, over named lists of shapes",
        "python -m bench backward",
        "python -m bench backward --dims 64,128 --masks causal --peers torch-flash,deterministic",
    )
    options.add_selection(command, LISTS, _DTYPES, "paper")
    options.add_kernel(command)
    options.add_peers(command, tuple(columns.BACKWARD_PEERS))
    options.add_against(command)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    measure(run_, options.problems_of(chosen, "paper"), options.peers_of(chosen))


def measure(
    run_: Session,
    problems: Sequence[tuple[str, Sequence[Problem]]],
    peers: Sequence[str] | None = None,
) -> None:
    """Measure problems of named lists beside peers, all where left out.

    FLOPs are counted as 2.5 times those of the forward pass.
    """
    if not run_.needs_gpu("backward"):
        return
    wanted = tuple(columns.BACKWARD_PEERS) if peers is None else peers
    dtypes = dict.fromkeys(problem.dtype for _, some in problems for problem in some)
    run_.measure_ceilings([f"matmul {dtype}" for dtype in dtypes])
    with run_.team(columns.backward(run_.kernel, wanted)) as team:
        if columns.OURS in team.absent:
            raise RuntimeError(f"cuflash itself: {team.absent[columns.OURS]}")
        for rows in run_.race_lists("backward", problems, team, gradients=True):
            for name in columns.OURS_BACKWARD:
                session.print_summary(rows, name, columns.OURS_BACKWARD)
