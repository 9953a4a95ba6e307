"""`python -m bench forward`: attention of 16 bits beside its peers, over named lists of shapes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import columns, options, session
from .session import Session
from .shapes import LISTS, Problem

_DTYPES = ("float16", "bfloat16", "float32")


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    known = (*columns.PEERS, *columns.CPU_PEERS)
    command = options.add_bench(
        commands,
        "forward",
        run,
        "attention beside its peers, over named lists of shapes",
        "python -m bench forward",
        "python -m bench forward --dims 128 --seqs 8192 --masks causal --peers fa3,torch-cudnn",
        "python -m bench forward --list gqa,long,decode --dtypes bfloat16 --json run.json",
        "python -m bench forward --kernel reference",
    )
    options.add_selection(command, LISTS, _DTYPES, "paper, or cpu without a GPU")
    options.add_kernel(command)
    options.add_peers(command, known)
    options.add_against(command)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    default = "cpu" if run_.place == "cpu" else "paper"
    measure(run_, options.problems_of(chosen, default), options.peers_of(chosen))


def measure(
    run_: Session,
    problems: Sequence[tuple[str, Sequence[Problem]]],
    peers: Sequence[str] | None = None,
) -> None:
    """Measure problems of named lists beside peers; all of the place where left out."""
    known = tuple(columns.PEERS if run_.place == "cuda" else columns.CPU_PEERS)
    wanted = known if peers is None else peers
    for name in wanted:
        if name not in known:
            raise ValueError(f"--peers: {name!r} does not run here; expected of {', '.join(known)}")
    if run_.place == "cuda":
        dtypes = dict.fromkeys(p.dtype for _, some in problems for p in some)
        products = [f"matmul {dtype}" for dtype in dtypes]
        run_.measure_ceilings([name for name in (*products, "copy") if name in columns.CEILINGS])
    with run_.team(columns.forward(run_.kernel, run_.place, wanted)) as team:
        if columns.OURS in team.absent:
            raise RuntimeError(f"cuflash itself: {team.absent[columns.OURS]}")
        for rows in run_.race_lists("forward", problems, team):
            session.print_summary(rows, columns.OURS)
