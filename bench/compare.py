"""`python -m bench compare OLD NEW`: has a kernel become slower? Told by ratios to a peer of the
same file, since boards and their clocks differ from run to run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import columns, options, race
from .results import load

LOSS = 0.03  # of speed to the peer, above which a group has lost
_SHAPE = ("list", "dtype", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "dim", "causal")
_GROUP = ("list", "dtype", "dim", "causal")
_OURS = {
    "forward": (columns.OURS,),
    "backward": columns.OURS_BACKWARD,
    "fp8": columns.RECIPES,
}
_REFERENCES = (*columns.PEERS, *columns.CPU_PEERS)


@dataclass(frozen=True, slots=True)
class Change:
    """Ratio of speeds to a peer, new to old, of one problem."""

    group: str
    problem: str
    peer: str
    ratio: float


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_command(
        commands,
        "compare",
        run,
        f"compare two result files by ratio to a peer of each; 1 on a loss above {LOSS:.0%}",
        "python -m bench compare old.json new.json",
        "python -m bench compare old.json new.json --peer fa3 --each",
    )
    command.add_argument("old", type=Path, metavar="OLD.json")
    command.add_argument("new", type=Path, metavar="NEW.json")
    command.add_argument(
        "--peer", choices=_REFERENCES,
        help=f"default: of {', '.join(_REFERENCES)} the first that both files have of a problem",
    )  # fmt: skip
    command.add_argument(
        "--each", action="store_true",
        help="judge each problem, rather than means over the lengths of a list, dtype, dim, mask",
    )  # fmt: skip


def run(chosen: argparse.Namespace) -> int:
    """Print the groups and answer with 1 where one has lost, or with 2 where nothing compares."""
    changes, lost = compare(load(chosen.old), load(chosen.new), chosen.peer)
    for line in lost:
        print(f"LOST  {line}")
    if not changes and not lost:
        raise ValueError(
            f"{chosen.old}, {chosen.new}: no problem that both have beside the same peer"
        )
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(change.problem if chosen.each else change.group, []).append(change)
    slower = 0
    for name, members in groups.items():
        mean = statistics.geometric_mean(change.ratio for change in members)
        worst = min(members, key=lambda change: change.ratio)
        verdict = "LOSS" if mean < 1 - LOSS else "ok"
        slower += verdict == "LOSS"
        peers = ", ".join(dict.fromkeys(change.peer for change in members))
        print(
            f"{verdict:<5} {mean:6.3f}  {name}, to {peers}; least {worst.ratio:.3f} {worst.problem}"
        )
    print(f"{len(groups)} groups of {len(changes)} problems, {slower} slower, {len(lost)} lost")
    return 1 if slower or lost else 0


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], peer: str | None = None
) -> tuple[list[Change], list[str]]:
    """Changes of what both records have, and what the new one failed at though it tried.

    A problem of ours that was right and is not any more is lost, whatever its time.
    """
    changes, lost = [], []
    for bench, ours in _OURS.items():
        before = {_key(row): row for row in old["benches"].get(bench, ())}
        for row in new["benches"].get(bench, ()):
            past = before.get(_key(row))
            if past is None:
                continue
            for name in ours:
                was, now = past["columns"].get(name), row["columns"].get(name)
                if was is None or now is None or not race.is_ranked(was):
                    continue
                problem = f"{bench} {name}: {_words(row, _SHAPE)}"
                if not race.is_ranked(now):
                    reason = now.get("wrong") or now.get("failed") or now.get("unsupported")
                    lost.append(f"{problem}: {reason or 'no time'}")
                    continue
                reference = _reference(past, row, peer)
                if reference:
                    ratio = _speed(row, name, reference) / _speed(past, name, reference)
                    group = f"{bench} {name}: {_words(row, _GROUP)}"
                    changes.append(Change(group, problem, reference, ratio))
    return changes, lost


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in _SHAPE)


def _words(row: Mapping[str, Any], fields: tuple[str, ...]) -> str:
    shown = [
        ("causal" if row[field] else "full") if field == "causal"
        else str(row[field]) if field in ("list", "dtype")
        else f"{field} {row[field]}"
        for field in fields
    ]  # fmt: skip
    return ", ".join(shown)


def _reference(past: Mapping[str, Any], row: Mapping[str, Any], peer: str | None) -> str | None:
    for name in (peer,) if peer else _REFERENCES:
        both = past["columns"].get(name), row["columns"].get(name)
        if all(entry is not None and race.is_ranked(entry) for entry in both):
            return name
    return None


def _speed(row: Mapping[str, Any], ours: str, peer: str) -> float:
    column = row["columns"]
    return float(column[peer]["ms"] / column[ours]["ms"])
