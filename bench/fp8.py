"""`python -m bench fp8`: attention to 8-bit codes beside its peers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import columns, options, session
from .session import Session
from .shapes import LISTS, Problem


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "fp8",
        run,
        "attention to 8-bit codes, beside peers with e4m3 and a scale a tensor",
        "python -m bench fp8",
        "python -m bench fp8 --dims 128 --seqs 8192 --recipes f8,i8 --peers fa3",
    )
    options.add_selection(command, LISTS, ("float16", "bfloat16"), "fp8")
    options.add_recipes(command)
    options.add_peers(command, columns.FP8_PEERS)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    peers = options.peers_of(chosen)
    for name, problems in options.problems_of(chosen, "fp8"):
        measure(run_, problems, chosen.recipes, peers, name)


def measure(
    run_: Session,
    problems: Sequence[Problem],
    recipes: Sequence[str],
    peers: Sequence[str] | None = None,
    label: str = "fp8",
) -> None:
    """Measure problems by these recipes, beside these peers; all of them where left out."""
    peers = tuple(columns.FP8_PEERS) if peers is None else peers
    if not run_.needs_gpu("fp8"):
        return
    run_.measure_ceilings(("matmul e4m3", "copy"))
    with run_.team(columns.fp8(recipes, peers)) as team:
        judged = dict.fromkeys(team.specs, "8 bits")
        rows = run_.race("fp8", problems, team, recipes, judged, list=label)
        for recipe in recipes:
            others = set(recipes) - {recipe}
            session.print_summary([_without(row, others) for row in rows], recipe)


def _without(row: dict[str, Any], names: set[str]) -> dict[str, Any]:
    kept = {name: entry for name, entry in row["columns"].items() if name not in names}
    return {**row, "columns": kept}
