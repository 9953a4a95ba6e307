"""One run: where it measures, for how long at most, and the rows that it prints and keeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cuflash.runtime import device

from . import columns, race
from .processes import Spec, Team
from .race import Pace
from .results import Results
from .shapes import Problem

_TINY = Problem(1, 1, 1, 16, 16, 16)  # for calls that are about no problem


class Session:
    """What the benches of a run share.

    `place` is ``"cuda"`` or ``"cpu"``; `against` is a source tree whose cuflash is measured too;
    `deadline` is in seconds of `time.monotonic`. `faults` are columns of ours that failed or were
    wrong.
    """

    def __init__(
        self,
        results: Results,
        pace: Pace,
        *,
        kernel: str = "auto",
        against: str | None = None,
        budget_s: float | None = None,
    ) -> None:
        self.results, self.pace, self.kernel, self.against = results, pace, kernel, against
        self.no_gpu = device.unavailable_reason()
        self.place = "cpu" if self.no_gpu or kernel == "reference" else "cuda"
        self.started = time.monotonic()
        self.deadline = None if budget_s is None else self.started + budget_s
        self.faults: list[str] = []

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    @property
    def flush_below(self) -> int:
        """Bytes that the L2 cache may still hold of one call when the next begins."""
        return 0 if self.place == "cpu" else device.cuda_device(0).l2_size

    def needs_gpu(self, bench: str) -> bool:
        """Whether there is one; else the bench is noted as skipped."""
        if self.place == "cuda":
            return True
        why = self.no_gpu.splitlines()[0] if self.no_gpu else "asked for on the CPU"
        self.results.skip(bench, f"needs a GPU: {why}")
        return False

    def team(self, specs: Mapping[str, Spec]) -> Team:
        """Their processes and a judge, started; those that can't work are noted. With a source tree
        to measure against, its columns too.
        """
        others = columns.against(specs, self.against) if self.against else {}
        team = Team({**specs, **others, columns.JUDGE: columns.judge(self.place)})
        team.present(team.specs)
        for name, reason in team.absent.items():
            self.results.skip(name, reason)
        self.results.data["versions"] |= team.versions()
        return team

    def race(
        self,
        bench: str,
        problems: Sequence[Problem],
        team: Team,
        ours: Iterable[str],
        judged: Mapping[str, str],
        gradients: bool = False,
        contest: bool = False,
        **labels: Any,
    ) -> list[dict[str, Any]]:
        """Measure problems, print a line each, and keep them with `labels`; those that the time
        does not reach are noted.
        """
        names = [n for n in team.specs if n != columns.JUDGE and n not in team.absent]
        rows = []
        header = ""
        for problem in problems:
            if self.is_late:
                self.results.skip(f"{bench}: {problem}", "out of time")
                continue
            row = {
                **labels,
                **race.run(
                    problem,
                    names,
                    team,
                    self.pace,
                    judged=judged,
                    flush_below=self.flush_below,
                    gradients=gradients,
                    contest=contest,
                ),
            }
            add_rates(row, problem, self.results.data["ceilings"], judged)
            rows.append(row)
            self.results.add(bench, [row])
            if not header:
                header = f"{'':<44}" + " ".join(f"{name[:15]:>15}" for name in names)
                print(f"\n{bench}\n{header}")
            print(_line(problem, row["columns"]), flush=True)
            for name in ours:
                entry = row["columns"].get(name, {})
                if "wrong" in entry or "failed" in entry:
                    reason = entry.get("wrong") or entry.get("failed")
                    self.faults.append(f"{bench}: {problem}: {name}: {reason}")
        return rows

    def race_lists(
        self,
        bench: str,
        problems: Iterable[tuple[str, Sequence[Problem]]],
        team: Team,
        gradients: bool = False,
    ) -> Iterator[list[dict[str, Any]]]:
        """`race` for each named list and dtype in it, ours against the others."""
        for label, some in problems:
            for dtype in dict.fromkeys(problem.dtype for problem in some):
                mine = [problem for problem in some if problem.dtype == dtype]
                judged = dict.fromkeys(team.specs, dtype)
                yield self.race(
                    bench, mine, team, (columns.OURS,), judged,
                    gradients=gradients, contest=True, list=label,
                )  # fmt: skip

    def measure_ceilings(self, names: Iterable[str]) -> None:
        """Products and copies, in turns; the record keeps their rates."""
        wanted = {name: columns.CEILINGS[name] for name in names}
        wanted = {n: s for n, s in wanted.items() if n not in self.results.data["ceilings"]}
        if not wanted:
            return
        with Team(wanted) as team:
            found = race.run(_TINY, list(wanted), team, self.pace, judged={})
            self.results.data["versions"] |= team.versions()
        for name, entry in found["columns"].items():
            if "ms" not in entry:
                self.results.skip(name, entry.get("failed", "no time"))
                continue
            work = entry["work"]
            unit, amount = ("tflops", 1e9) if "flops" in work else ("gb_s", 1e6)
            rate = next(iter(work.values())) / entry["ms"] / amount
            self.results.data["ceilings"][name] = {unit: rate, "spread": entry["spread"]}
            shown = "TFLOP/s" if unit == "tflops" else "GB/s"
            print(f"ceiling  {name:<16} {rate:8.0f} {shown} +- {entry['spread']:.1%}", flush=True)


def add_rates(
    row: dict[str, Any], problem: Problem, ceilings: Mapping[str, Any], judged: Mapping[str, str]
) -> None:
    """TFLOP/s, GB/s and parts of the ceilings of the same run, of each column with a time."""
    copy = ceilings.get("copy", {}).get("gb_s")
    for name, entry in row["columns"].items():
        if "ms" not in entry:
            continue
        work = entry.get("work") or {"flops": problem.flops, "bytes": problem.moved_bytes}
        if "flops" in work:
            kind = "e4m3" if judged.get(name) == "8 bits" else problem.dtype
            entry["tflops"] = work["flops"] / entry["ms"] / 1e9
            top = ceilings.get(f"matmul {kind}", {}).get("tflops")
            if top:
                entry["of_matmul"] = entry["tflops"] / top
        if "bytes" in work:
            entry["gb_s"] = work["bytes"] / entry["ms"] / 1e6
            if copy:
                entry["of_copy"] = entry["gb_s"] / copy


def ratios(rows: Iterable[Mapping[str, Any]], ours: str, peers: Iterable[str]) -> list[float]:
    """Speed of ours to that of the fastest peer that is right, in each row that has both."""
    found = []
    for row in rows:
        column = row["columns"]
        ranked = [column[n]["ms"] for n in peers if n in column and race.is_ranked(column[n])]
        if ranked and ours in column and race.is_ranked(column[ours]):
            found.append(min(ranked) / column[ours]["ms"])
    return found


def print_summary(
    rows: Sequence[Mapping[str, Any]], ours: str, also_ours: Sequence[str] = ()
) -> None:
    """Geometric means of the ratios to each peer, and to the best of them."""
    found_names = dict.fromkeys(name for row in rows for name in row["columns"])
    names = [name for name in found_names if name not in (ours, *also_ours)]
    shown = {name: (name,) for name in names}
    if len(names) > 1:
        shown["the best"] = tuple(names)
    for label, peers in shown.items():
        found = ratios(rows, ours, peers)
        if found:
            mean = statistics.geometric_mean(found)
            print(f"{ours} to {label}: geometric mean {mean:.3f}, least {min(found):.3f}")


def _line(problem: Problem, column: Mapping[str, Mapping[str, Any]]) -> str:
    memory_bound = problem.q_len == 1
    cells = []
    for entry in column.values():
        if "ms" not in entry:
            text = "-" if "unsupported" in entry else "failed"
        elif "tflops" not in entry or memory_bound:
            text = f"{entry['gb_s']:.0f} GB/s"
        elif entry["tflops"] < 10:
            text = f"{entry['ms']:.3g} ms"
        else:
            text = f"{entry['tflops']:.0f} +-{entry['spread']:.1%}"
        cells.append(f"{text + (' WRONG' if 'wrong' in entry else ''):>15}")
    return f"{problem!s:<44}{' '.join(cells)}"
