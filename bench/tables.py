"""Records as tables of Markdown, one function for each bench."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import columns, race
from .compile_time import was_compiled
from .session import ratios

Row = Mapping[str, Any]

_MOST_PEERS = 3  # in a cell
_MARK = "-"
_STATIC_DIMS = (64, 128, 256)
_WITH_PEERS = ("forward", "backward", "fp8")
_SAID = ("cuflash", "NVRTC")  # with the environment


def render(name: str, record: Mapping[str, Any]) -> str:
    """The table of a bench, under a line that says where it is from.

    Raises
    ------
    ValueError
        For a name that is none, and for a record without that bench.
    """
    if name not in TABLES:
        raise ValueError(f"table: got {name!r}; expected one of {', '.join(TABLES)}")
    rows = record["benches"].get(name)
    if not rows:
        raise ValueError(f"table {name!r}: the record has no such bench")
    return "\n\n".join([_origin(name, record), *TABLES[name](rows)]) + "\n"


def _origin(name: str, record: Mapping[str, Any]) -> str:
    """Device, versions, date and command; beside peers, their versions and the run's ceilings."""
    environment = record["environment"]
    devices = [name for name in environment["devices"] if name != "CPU"] or ["CPU"]
    parts = [
        devices[0],
        f"CUDA {environment['cuda']}" if environment["cuda"] != "none" else "",
        f"CuPy {environment['cupy']}, NumPy {environment['numpy']}",
    ]
    if name in _WITH_PEERS:
        versions = record["versions"].items()
        parts += [f"{peer} {version}" for peer, version in versions if peer not in _SAID]
        parts += _ceilings(record["ceilings"])
    return "; ".join(filter(None, [*parts, record["date"], f"`{record['command']}`"])) + "."


def _ceilings(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {entry['tflops']:.0f} TFLOP/s" if "tflops" in entry
        else f"{name} {entry['gb_s']:.0f} GB/s"
        for name, entry in found.items()
    ]  # fmt: skip


def _forward(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name, dtype in dict.fromkeys((row["list"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["list"], row["dtype"]) == (name, dtype)]
        parts += _speeds(mine, f"`{name}`, {dtype}", [columns.OURS])
    return parts


def _fp8(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name in dict.fromkeys(row["list"] for row in rows):
        mine = [row for row in rows if row["list"] == name]
        ours = [recipe for recipe in columns.RECIPES if recipe in mine[0]["columns"]]
        parts += _speeds(mine, f"`{name}`, 8 bits", ours)
    return parts


def _backward(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name, dtype in dict.fromkeys((row["list"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["list"], row["dtype"]) == (name, dtype)]
        ours = [name for name in columns.OURS_BACKWARD if name in mine[0]["columns"]]
        parts += _speeds(mine, f"`{name}`, {dtype}, backward", ours)
        slower = ratios(mine, columns.OURS, ["deterministic"])
        if slower:
            parts.append(
                f"A fixed order of sums takes {statistics.geometric_mean(slower):.2f} of the time "
                f"in the geometric mean, {min(slower):.2f} to {max(slower):.2f}."
            )
    return parts


def _speeds(rows: Sequence[Row], title: str, ours: Sequence[str]) -> list[str]:
    peers = _fastest(rows, ours)
    shown = [*ours, *peers]
    decodes = all(row["q_len"] == 1 for row in rows)
    on_cpu = all(entry.get("tflops", 0) < 10 for row in rows for entry in row["columns"].values())
    unit = "GB/s" if decodes else "ms" if on_cpu else "TFLOP/s"

    def cell(row: Row) -> str:
        column = row["columns"]
        ranked = {n: column[n]["ms"] for n in shown if race.is_ranked(column.get(n, {}))}
        first = min(ranked, key=lambda name: ranked[name], default="")
        return " / ".join(_entry(column.get(n, {}), unit, bold=n == first) for n in shown)

    summary = [
        f"{name} to {label}: {statistics.geometric_mean(found):.2f} in the geometric mean, "
        f"{min(found):.2f} at least."
        for name in ours
        for label, some in _groups(peers).items()
        if (found := ratios(rows, name, some))
    ]
    errors = _errors(rows, shown)
    heading = f"{title}; {unit}, {' / '.join(shown)}:"
    if rows[0]["list"] in ("paper", "fp8", "gqa", "cpu"):
        table = _by_length(rows, cell)
    else:
        kinds = [_kind(row) for row in rows]
        table = _table(("problem", " / ".join(shown)), zip(kinds, map(cell, rows), strict=True))
    return [heading, table, " ".join([*summary, errors])]


def _groups(peers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in peers}
    return groups | ({"the best": tuple(peers)} if len(peers) > 1 else {})


def _fastest(rows: Sequence[Row], ours: Sequence[str]) -> list[str]:
    """Peers that have the most cells, then the fastest of them: few enough to read."""
    names = dict.fromkeys(n for row in rows for n in row["columns"] if n not in ours)

    def order(name: str) -> tuple[int, float]:
        found = ratios(rows, ours[0], [name])
        return -len(found), statistics.geometric_mean(found) if found else 0.0

    with_times = [name for name in names if order(name)[0] < 0]
    return sorted(with_times, key=order)[:_MOST_PEERS]


def _errors(rows: Sequence[Row], shown: Sequence[str]) -> str:
    parts = []
    for name in shown:
        found = [
            row["columns"][name]["error"]
            for row in rows
            if race.is_ranked(row["columns"].get(name, {})) and "error" in row["columns"][name]
        ]
        if found:
            parts.append(f"{name} {min(found):.1e} to {max(found):.1e}")
    return f"Relative L2 errors: {', '.join(parts)}." if parts else ""


def _entry(entry: Row, unit: str, *, bold: bool) -> str:
    if "ms" not in entry:
        return _MARK
    field = {"ms": "ms", "GB/s": "gb_s", "TFLOP/s": "tflops"}[unit]
    text = f"{entry[field]:.3g}" if unit == "ms" else f"{entry[field]:.0f}"
    if "failed" in entry or "wrong" in entry:
        return f"~~{text}~~"
    return f"**{text}**" if bold else text


def _by_length(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    lengths = sorted({row["kv_len"] for row in rows})
    kinds = dict.fromkeys((row["dim"], row["causal"]) for row in rows)
    lines = []
    for dim, causal in sorted(kinds):
        mine = {row["kv_len"]: row for row in rows if (row["dim"], row["causal"]) == (dim, causal)}
        cells = (cell(mine[n]) if n in mine else _MARK for n in lengths)
        lines.append((str(dim), "causal" if causal else "full", *cells))
    return _table(("dim", "mask", *(f"seq {n:,}" for n in lengths)), lines)


def _kind(row: Row) -> str:
    heads = f"{row['q_heads']}"
    if row["q_heads"] != row["kv_heads"]:
        heads += f"/{row['kv_heads']}"
    lengths = f"{row['q_len']:,}"
    if row["q_len"] != row["kv_len"]:
        lengths += f" x {row['kv_len']:,}"
    mask = ", causal" if row["causal"] else ""
    return f"batch {row['batch']}, {heads} heads, {lengths}, dim {row['dim']}{mask}"


def _quantize(rows: Sequence[Row]) -> list[str]:
    recipes = dict.fromkeys(recipe for row in rows for recipe in row["of_copy"])
    shown = " / ".join(recipes)

    def shares(row: Row, field: str, digits: int) -> str:
        found = (row[field].get(recipe) for recipe in recipes)
        return " / ".join(_MARK if x is None else f"{x:.{digits}f}" for x in found)

    return [
        f"Quantising by {shown}: bytes a second in parts of a copy's, counted as if all rows were "
        "read twice.",
        _by_length(rows, lambda row: shares(row, "of_copy", 2)),
        "From 16-bit arrays, quantising included: speed in parts of that of 16 bits.",
        _by_length(rows, lambda row: shares(row, "to_16_bits", 2)),
    ]


def _host(rows: Sequence[Row]) -> list[str]:
    lines = [(row["call"], f"{row['us']:.1f}", f"{row['spread']:.0%}") for row in rows]
    return [_table(("warm call", "µs of the host", "quartiles"), lines)]


def _compile(rows: Sequence[Row]) -> list[str]:
    alone = {row["kernel"]: row["seconds"] for row in rows if "seconds" in row}
    parts = [
        f"First call of a process, s: {row['uncached_s']:.2f} where nothing was compiled before "
        f"({row['compiling_s']:.2f} NVRTC's), {row['cached_s']:.2f} from the cache "
        f"({row['kernel']})."
        for row in rows
        if "compiling_s" in row and was_compiled(row["compiling_s"], alone.get(row["kernel"]))
    ]
    kinds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if "seconds" in row:
            kinds.setdefault((row["arch"], row["family"]), []).append(row["seconds"])
    lines = [
        (arch, family, str(len(s)), f"{statistics.median(s):.2f}", f"{max(s):.2f}")
        for (arch, family), s in kinds.items()
    ]
    return [*parts, _table(("target", "family", "kernels", "median s", "longest"), lines)]


def _memory(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(row["column"] for row in rows if "bytes" in row)
    lengths = sorted({row["seq"] for row in rows if "bytes" in row})
    found = {(row["column"], row["seq"]): row for row in rows if "bytes" in row}

    def cell(name: str, seq: int) -> str:
        row = found.get((name, seq))
        if row is None:
            return _MARK
        digits = "#.3g" if row["ms"] < 100 else ",.0f"
        return f"{row['ms']:{digits}} ms, {row['bytes'] / 1e6:,.4g} MB"

    lines = [(f"{seq:,}", *(cell(name, seq) for name in names)) for seq in lengths]
    notes = [
        f"{row['column']}: memory grows with seq to the power of {row['exponent']:.2f}, time "
        f"{row['time_exponent']:.2f}."
        for row in rows
        if "exponent" in row
    ]
    notes += [
        f"The longest that fits: {row['largest']:,} tokens, {row['heads']} head"
        f"{'s' if row['heads'] > 1 else ''} of dim {row['dim']}, {row['bytes_each'] / 1e9:.3g} GB."
        for row in rows
        if "largest" in row
    ]
    return [_table(("seq", *names), lines), " ".join(notes)]


def _io(rows: Sequence[Row]) -> list[str]:
    lines = [
        (
            row["column"],
            f"{row['seq']:,}",
            f"{row['measured'] / 1e9:.3g}",
            f"{row['predicted'] / 1e9:.3g}",
            f"{row['measured'] / row['predicted'] - 1:+.0%}",
        )
        for row in rows
    ]
    heads = ("", "seq", "GB measured", "GB predicted", "difference")
    return [_table(heads, lines)]


def _static(rows: Sequence[Row]) -> list[str]:
    few = [row for row in rows if row["dim"] in _STATIC_DIMS and not row["causal"]]
    lines = []
    for row in few or rows:
        name = row["kernel"].removeprefix("cuflash_").removeprefix("fwd_")
        if "failed" in row:
            lines.append((row["arch"], name, row["tile"], "failed", *[""] * 6))
            continue
        shares = [f"{row[part] / row['mma']:.0%}" for part in ("mufu", "issue", "shared")]
        lines.append(
            (
                row["arch"], name, row["tile"],
                f"{row['registers']}" + (f" ({row['spilled_bytes']} B spilled)"
                                         if row["spilled_bytes"] else ""),
                f"{row['resident_blocks']} x {row['shared_memory'] / 1024:.0f} KiB",
                f"{row['instructions']:.0f}", f"{row['mma']:.0f}", *shares,
                ", ".join(row["limiters"]),
            )
        )  # fmt: skip
    heads = (
        *("target", "kernel", "tile", "registers", "blocks", "instructions", "MMA cycles"),
        *("MUFU", "issue", "shared", "limited by"),
    )
    left_out = len(rows) - len(lines)
    more = f"{left_out} more, causal or of other head dims, are in the file." if left_out else ""
    return [_table(heads, lines), *filter(None, [more])]


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "forward": _forward,
    "backward": _backward,
    "fp8": _fp8,
    "quantize": _quantize,
    "host": _host,
    "compile": _compile,
    "memory": _memory,
    "io": _io,
    "static": _static,
}
"""The bench's rows to paragraphs and tables, by the name that the record has them under."""
