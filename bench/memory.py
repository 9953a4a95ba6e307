"""`python -m bench memory`: time and peak memory over the length, and the longest that fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import columns, options, race, stats
from .processes import WINDOW_S, Failed, Spec, Team
from .session import Session
from .shapes import Problem

_LENGTHS = tuple(1 << n for n in range(10, 21))
_LENGTHS_ON_CPU = tuple(1 << n for n in range(9, 14))
# Scores of longer ones take minutes to move, or do not fit.
_MOST = {"standard": 1 << 17, "blas": 1 << 12}
_LARGEST_S = 300.0


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "memory",
        run,
        "time and peak memory over the length at fixed heads, and the longest that fits",
        "python -m bench memory",
        "python -m bench memory --seqs 65536,262144,1048576 --json memory.json",
    )
    options.add_kernel(command)
    command.add_argument(
        "--seqs", type=options.numbers, metavar="N[,N]",
        help="three or more; default: 1,024 to 1,048,576, or 512 to 8,192 on a CPU",
    )  # fmt: skip


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    if chosen.seqs and len(set(chosen.seqs)) < 3:
        raise ValueError(f"--seqs: got {len(set(chosen.seqs))}; a fit needs 3 or more")
    measure(run_, chosen.seqs)


def measure(run_: Session, lengths: Sequence[int] | None = None) -> None:
    """Causal attention: on a GPU 4 query heads that share one kv head of dim 128."""
    on_gpu = run_.place == "cuda"
    lengths = sorted(set(lengths or (_LENGTHS if on_gpu else _LENGTHS_ON_CPU)))
    other = "standard" if on_gpu else "blas"
    pace = run_.pace
    run_.pace = race.Pace(3, pace.settle_ms, pace.window_ms, pace.patience_s)
    print(f"\n{'memory':<22}{'seq':>10} {'ms':>10} {'MB':>10}")
    rows: list[dict[str, Any]] = []
    with run_.team(columns.forward(run_.kernel, run_.place, (other,))) as team:
        for seq in lengths:
            if run_.is_late:
                run_.results.skip(f"memory: seq {seq}", "out of time")
                continue
            names = [
                name for name in (columns.OURS, other)
                if name not in team.absent and seq <= _MOST.get(name, seq)
            ]  # fmt: skip
            rows += _of_length(run_, team, _problem(seq, on_gpu), names)
    run_.pace = pace
    rows += [found for name in (columns.OURS, other) if (found := fit(rows, name))]
    for row in rows:
        if "exponent" in row:
            print(
                f"{row['column']}: memory ~ seq^{row['exponent']:.3f} "
                f"(+- {row['exponent_error']:.3f}), time ~ seq^{row['time_exponent']:.2f}"
            )
    if on_gpu and not run_.is_late:
        rows += _largest(run_)
    run_.results.add("memory", rows)


def _problem(seq: int, on_gpu: bool) -> Problem:
    if on_gpu:
        return Problem(1, 4, 1, seq, seq, 128, causal=True)
    return Problem(1, 8, 8, seq, seq, 64, "float32", causal=True)


def _of_length(
    run_: Session, team: Team, problem: Problem, names: Sequence[str]
) -> list[dict[str, Any]]:
    judged = dict.fromkeys(names, problem.dtype)
    found = race.run(problem, names, team, run_.pace, judged=judged, keep=True)
    rows = []
    for name, entry in found["columns"].items():
        if not race.is_ranked(entry):
            why = entry.get("wrong") or entry.get("failed") or entry.get("unsupported")
            run_.results.skip(f"memory: {name} at {problem.kv_len}", str(why))
            if name == columns.OURS:
                run_.faults.append(f"memory: {problem}: {why}")
            continue
        process = team.present([name])[name]
        try:
            peak = process.ask("peak", WINDOW_S)
            process.ask("release", WINDOW_S)
        except Failed as failure:
            run_.results.skip(f"memory: {name} at {problem.kv_len}", str(failure))
            continue
        rows.append(
            {
                "column": name, "seq": problem.kv_len, "ms": entry["ms"],
                "spread": entry["spread"], "bytes": problem.input_bytes + peak,
                "of_them_inputs_and_result": problem.moved_bytes, "error": entry["error"],
                "problem": problem.to_dict(),
            }
        )  # fmt: skip
        print(
            f"{name:<22}{problem.kv_len:>10} {entry['ms']:>10.3f} {rows[-1]['bytes'] / 1e6:>10.2f}",
            flush=True,
        )
    return rows


def fit(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Exponents over the longer half of the lengths, where what does not grow counts for little;
    None for fewer than three.
    """
    mine = sorted((row for row in rows if row["column"] == name), key=lambda row: row["seq"])
    mine = mine[min(len(mine) // 2, max(len(mine) - 3, 0)) :]
    if len(mine) < 3:
        return None
    lengths = [row["seq"] for row in mine]
    exponent, error = stats.fit_exponent(lengths, [row["bytes"] for row in mine])
    time_exponent, _ = stats.fit_exponent(lengths, [row["ms"] for row in mine])
    return {
        "column": name, "exponent": exponent, "exponent_error": error,
        "time_exponent": time_exponent, "from": lengths[0], "to": lengths[-1],
    }  # fmt: skip


def _largest(run_: Session) -> list[dict[str, Any]]:
    heads, dim = 1, 128
    with Team({"largest": Spec("bench.peers.largest")}) as team:
        process = team.present(["largest"]).get("largest")
        if process is None:
            run_.results.skip("memory: the longest that fits", team.absent["largest"])
            return []
        arguments = {"heads": heads, "dim": dim}
        try:
            found = process.ask("call", _LARGEST_S, name="find", arguments=arguments)
        except Failed as failure:
            run_.results.skip("memory: the longest that fits", str(failure))
            run_.faults.append(f"memory: the longest that fits: {failure}")
            return []
    print(f"the longest that fits: {found['largest']:,} tokens of {heads} head of dim {dim}")
    return [{"column": columns.OURS, **found}]
