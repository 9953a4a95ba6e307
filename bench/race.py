"""Times the columns of one problem in turns of random order, and judges their results."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import gradient_samples, samples, stats
from .columns import JUDGE
from .processes import PREPARE_S, WINDOW_S, Failed, Process, Team
from .shapes import Problem
from .worker import unpack

_CLOSE = 1.15  # times the time of the fastest


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure: `rounds` windows of `window_ms`, each after `settle_ms` of the same.

    A column that has taken `patience_s` of a problem is not asked for more rounds. In a contest,
    half of the rounds are for all columns, and those close to the fastest, whose order is in
    question, have up to twice as many.
    """

    rounds: int = 7
    settle_ms: float = 45.0
    window_ms: float = 15.0
    patience_s: float = 6.0


def run(
    problem: Problem,
    names: Sequence[str],
    team: Team,
    pace: Pace,
    *,
    judged: Mapping[str, str],
    flush_below: int = 0,
    seed: int = 1,
    keep: bool = False,
    gradients: bool = False,
    contest: bool = False,
) -> dict[str, Any]:
    """Measure one problem.

    Parameters
    ----------
    problem : Problem
    names : sequence of str
        Columns of `team`.
    team : Team
        With a judge, unless nothing is judged.
    pace : Pace
    judged : mapping
        Which columns are judged, by which of `samples.BOUNDS`.
    flush_below : int
        Flush the L2 cache before each call of a problem whose inputs have fewer bytes.
    seed : int
        Of inputs, of what is sampled, and of the order.
    keep : bool
        Leave the problem with the processes, to ask them for more.
    gradients : bool
        Results are dq, dk and dv, each judged.
    contest : bool
        All columns do the same, and the fastest count.

    Returns
    -------
    dict
        JSON-ready: the problem, and of each column ``ms``, ``spread`` and ``rounds``; ``error``
        and ``wrong`` of those that are judged; ``note`` and ``work`` where it has them; or
        ``failed`` or ``unsupported`` with the reason.
    """
    flush = problem.input_bytes < flush_below
    column: dict[str, dict[str, Any]] = {name: {} for name in names}
    running, digests = _prepare(problem, names, team, column, seed)

    def window(name: str) -> float:
        limit = WINDOW_S + 3 * (pace.settle_ms + pace.window_ms) / 1e3
        return float(
            running[name].ask(
                "window", limit, settle_ms=pace.settle_ms, window_ms=pace.window_ms, flush=flush
            )
        )

    order = random.Random(f"{seed} {problem}")  # another for each problem
    times = take_turns(running, window, pace, order, team, column, contest)
    for name, found in times.items():
        if found and not _has_failed(column[name]):
            column[name]["ms"], column[name]["spread"] = stats.median_and_spread(found)
            column[name]["rounds"] = len(found)
    _judge(problem, running, team, column, digests, judged, seed, gradients)
    for name, process in () if keep else running.items():
        _try(name, team, column, partial(process.ask, "release", WINDOW_S))
    return {**problem.to_dict(), "flushed": flush, "columns": column}


def take_turns(
    running: dict[str, Process],
    measure: Callable[[str], float],
    pace: Pace,
    chance: random.Random,
    team: Team,
    column: dict[str, dict[str, Any]],
    contest: bool = False,
) -> dict[str, list[float]]:
    """`rounds` of what `measure` finds of each, in an order of its own; who fails is left out."""
    times: dict[str, list[float]] = {name: [] for name in running}
    spent = dict.fromkeys(running, 0.0)
    asked = list(running)
    for finished in range(2 * pace.rounds if contest else pace.rounds):
        if contest and finished == (pace.rounds + 1) // 2:
            medians = {name: statistics.median(times[name]) for name in running}
            asked = [name for name in medians if medians[name] <= _CLOSE * min(medians.values())]
        for name in chance.sample(asked, len(asked)):
            if spent[name] > pace.patience_s or name not in running:
                continue
            begin = time.monotonic()
            found = _try(name, team, column, partial(measure, name))
            spent[name] += time.monotonic() - begin
            if found is None:
                del running[name]
            else:
                times[name].append(found)
    return times


def _prepare(
    problem: Problem,
    names: Sequence[str],
    team: Team,
    column: dict[str, dict[str, Any]],
    seed: int,
) -> tuple[dict[str, Process], dict[str, str]]:
    """All at a time: those that can work with the problem, and digests of their inputs."""
    present = team.present(names)
    for name in names:
        if name not in present:
            column[name]["failed"] = team.absent[name]
    for process in present.values():
        process.send("prepare", problem=problem.to_dict(), seed=seed)
    running, digests = {}, {}
    for name, process in present.items():
        answer = _try(name, team, column, partial(process.receive, PREPARE_S))
        if answer is None:
            continue
        running[name], digests[name] = process, answer["digest"]
        column[name] |= {key: answer[key] for key in ("note", "work") if answer[key]}
    return running, digests


def _judge(
    problem: Problem,
    running: dict[str, Process],
    team: Team,
    column: dict[str, dict[str, Any]],
    digests: Mapping[str, str],
    judged: Mapping[str, str],
    seed: int,
    gradients: bool,
) -> None:
    asked = [name for name in running if name in judged]
    if not asked:
        return
    chosen = samples.choose(problem, seed)
    as_lists = [[s.entry, s.head, list(s.rows)] for s in chosen]
    exact, of_judge = None, {JUDGE: dict[str, Any]()}
    if judge := team.present([JUDGE]).get(JUDGE):
        exact = _try(
            JUDGE, team, of_judge,
            partial(
                judge.ask, "exact", PREPARE_S,
                problem=problem.to_dict(), seed=seed, samples=as_lists, gradients=gradients,
            ),
        )  # fmt: skip
    for name in asked:
        entry = column[name]
        if exact is None:
            reason = of_judge[JUDGE].get("failed") or team.absent.get(JUDGE)
            entry["wrong"] = f"not judged: {reason}"
        elif digests[name] != exact["digest"]:
            entry["wrong"] = "its inputs are not those of the judge"
        else:
            process = running[name]
            rows = _try(
                name, team, column,
                partial(process.ask, "rows", WINDOW_S, samples=as_lists),
            )  # fmt: skip
            if rows is None:
                del running[name]
                continue
            _compare(entry, unpack(rows), unpack(exact["rows"]), judged[name], gradients)


def _compare(
    entry: dict[str, Any], found: samples.Array, exact: samples.Array, kind: str, gradients: bool
) -> None:
    """The error of a result, or of each gradient and the largest of them, and what is wrong."""
    if not gradients:
        found, exact = found[None], exact[None]
    names, least = (gradient_samples.NAMES, gradient_samples.LEAST) if gradients else (("",), 0.0)
    errors: dict[str, float | None] = {}
    for name, some, right in zip(names, found, exact, strict=True):
        error, worst = samples.error_of(some, right, least)
        errors[name] = error if error < float("inf") else None
        if not samples.is_right(error, worst, kind):
            text = f"relative L2 error {error:.2g}, {worst:.2g} in one row"
            entry.setdefault("wrong", f"{name}: {text}" if name else text)
    known = [error for error in errors.values() if error is not None]
    entry["error"] = max(known) if len(known) == len(errors) else None
    if gradients:
        entry["errors"] = errors


def _try(
    name: str, team: Team, column: dict[str, dict[str, Any]], action: Callable[[], Any]
) -> Any:
    """What an action answers, or None where it fails, which the column then tells."""
    try:
        answer = action()
    except Failed as failure:
        column[name]["unsupported" if failure.unsupported else "failed"] = str(failure)
        if failure.gone:
            team.lost(name, str(failure))
        return None
    return True if answer is None else answer


def _has_failed(entry: Mapping[str, Any]) -> bool:
    return "failed" in entry or "unsupported" in entry


def is_ranked(entry: Mapping[str, Any]) -> bool:
    """Whether a column has a time that counts."""
    return "ms" in entry and "wrong" not in entry and not _has_failed(entry)
