"""`python -m bench quantize`: quantising beside a copy, and the whole of 8-bit attention from
16-bit arrays beside attention in 16 bits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from . import columns, options, race
from .session import Session
from .shapes import LISTS, Problem


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "quantize",
        run,
        "quantising beside a copy, and 8 bits from 16-bit arrays beside 16 bits",
        "python -m bench quantize",
        "python -m bench quantize --dims 128 --recipes f8",
    )
    options.add_selection(command, LISTS, ("float16", "bfloat16"), "fp8")
    options.add_recipes(command)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    for name, problems in options.problems_of(chosen, "fp8"):
        measure(run_, problems, chosen.recipes, name)


def measure(
    run_: Session, problems: Sequence[Problem], recipes: Sequence[str], label: str = "fp8"
) -> None:
    """Measure problems by these recipes. The copy of the row, not of the run, is the ceiling."""
    if not run_.needs_gpu("quantize"):
        return
    with run_.team(columns.quantize(recipes)) as team:
        judged = {"16 bits": problems[0].dtype, **{f"whole {r}": "8 bits" for r in recipes}}
        ours = ("16 bits", *(f"{part} {r}" for r in recipes for part in ("quantise", "whole")))
        rows = run_.race("quantize", problems, team, ours, judged, list=label)
    for row in rows:
        add_shares(row, recipes)
    for recipe in recipes:
        for share, words in (("of_copy", "quantising, part of a copy"), ("to_16_bits", "whole")):
            found = [row[share][recipe] for row in rows if recipe in row[share]]
            if found:
                mean = statistics.geometric_mean(found)
                print(f"{recipe} {words}: geometric mean {mean:.3f}, least {min(found):.3f}")


def add_shares(row: dict[str, Any], recipes: Sequence[str]) -> None:
    """Bytes a second that quantising moves in parts of those that the copy beside it does; and the
    speed of the whole in parts of that of 16 bits.
    """
    column = {n: entry for n, entry in row["columns"].items() if race.is_ranked(entry)}
    row["of_copy"], row["to_16_bits"] = {}, {}
    for recipe in recipes:
        quantised, whole = column.get(f"quantise {recipe}"), column.get(f"whole {recipe}")
        if quantised and "copy" in column:
            row["of_copy"][recipe] = quantised["gb_s"] / column["copy"]["gb_s"]
        if whole and "16 bits" in column:
            row["to_16_bits"][recipe] = column["16 bits"]["ms"] / whole["ms"]
