"""Figures of a record, beside its file: no figure without it.

Grounds are transparent and colours of middle brightness, so that they can be read in print and on
dark pages. Needs matplotlib, which is imported when the first is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import columns, race

Row = Mapping[str, Any]

_GREY = "#808890"
_COLOURS = ("#E0620D", "#2E86C8", "#12A077", "#C46CA0", "#B08A10", "#7A6FD0", "#C0504D", "#6E8B3D")
_MARKERS = "osD^vP*X"
_PANEL = (3.6, 2.7)  # inches


def figures_of(bench: str, record: Mapping[str, Any]) -> list[str]:
    """Names of the figures that a bench of a record gives."""
    rows = record["benches"].get(bench, ())
    return [name for name, (of, select, _) in _FIGURES.items() if of == bench and select(rows)]


def path_of(file: Path, figure: str) -> Path:
    """Where a figure of a file lies."""
    return file.with_name(f"{file.stem}-{figure}.svg")


def draw_all(record: Mapping[str, Any], file: Path) -> list[Path]:
    """Draw every figure that a record gives, beside its file.

    Raises
    ------
    RuntimeError
        Where matplotlib is missing.
    """
    drawn = []
    for name, (bench, select, draw) in _FIGURES.items():
        if rows := select(record["benches"].get(bench, ())):
            drawn.append(path_of(file, name))
            _save(draw(rows), drawn[-1], f"{file.name}, {_device(record)}, {record['date']}")
    return drawn


def _speed(rows: Sequence[Row]) -> Any:
    return _over_length(rows, lambda entry: entry["tflops"], "TFLOP/s", log=False)


def _error(rows: Sequence[Row]) -> Any:
    return _over_length(rows, lambda entry: entry["error"], "relative L2 error", log=True)


def _over_length(
    rows: Sequence[Row], value: Callable[[Row], float], label: str, *, log: bool
) -> Any:
    """A column of panels for each head dim, a row for each mask."""
    dims = sorted({row["dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    names = list(dict.fromkeys(name for row in rows for name in row["columns"]))
    canvas, panels = _canvas(len(masks), len(dims))
    for i, causal in enumerate(masks):
        for j, dim in enumerate(dims):
            panel = panels[i][j]
            mine = sorted(
                (row for row in rows if (row["dim"], row["causal"]) == (dim, causal)),
                key=lambda row: row["kv_len"],
            )
            for name in names:
                points = [
                    (row["kv_len"], value(row["columns"][name]))
                    for row in mine
                    if race.is_ranked(row["columns"].get(name, {}))
                ]
                _line(panel, points, name, names.index(name))
            panel.set_title(f"dim {dim}, {'causal' if causal else 'full'}", fontsize="medium")
            _lengths(panel, [row["kv_len"] for row in mine])
            if log:
                panel.set_yscale("log")
            else:
                panel.set_ylim(bottom=0)
        panels[i][0].set_ylabel(label)
    return canvas


def _io(rows: Sequence[Row]) -> Any:
    canvas, panels = _canvas(1, 1)
    panel = panels[0][0]
    names = list(dict.fromkeys(row["column"] for row in rows))
    for index, name in enumerate(names):
        mine = sorted((row for row in rows if row["column"] == name), key=lambda row: row["seq"])
        _line(panel, [(row["seq"], row["measured"] / 1e9) for row in mine], name, index)
        panel.plot(
            [row["seq"] for row in mine],
            [row["predicted"] / 1e9 for row in mine],
            linestyle=":", color=_COLOURS[index], label=f"{name}, predicted",
        )  # fmt: skip
    _lengths(panel, sorted({row["seq"] for row in rows}))
    panel.set_yscale("log")
    panel.set_ylabel("GB to and from main memory")
    return canvas


def _growth(rows: Sequence[Row]) -> Any:
    canvas, panels = _canvas(1, 2)
    names = list(dict.fromkeys(row["column"] for row in rows))
    for panel, field, unit, label in (
        (panels[0][0], "bytes", 1e6, "peak memory, MB"),
        (panels[0][1], "ms", 1.0, "time of a call, ms"),
    ):
        for index, name in enumerate(names):
            mine = [(row["seq"], row[field] / unit) for row in rows if row["column"] == name]
            _line(panel, sorted(mine), name, index)
        _lengths(panel, sorted({row["seq"] for row in rows}))
        panel.set_yscale("log")
        panel.set_ylabel(label)
    return canvas


def _of_paper(rows: Sequence[Row]) -> list[Row]:
    """FlashAttention's table in one dtype."""
    kept = [row for row in rows if row["list"] == "paper"]
    return [row for row in kept if row["dtype"] == kept[0]["dtype"]]


def _of_fp8(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["list"] == "fp8"]


def _with_errors(rows: Sequence[Row]) -> list[Row]:
    """The table with the columns that were judged."""
    kept: list[Row] = []
    for row in _of_paper(rows):
        judged = {name: x for name, x in row["columns"].items() if x.get("error")}
        kept.append({**row, "columns": judged})
    return kept


def _with_bytes(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "bytes" in row]


def _canvas(rows: int, across: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(_PANEL[0] * across, _PANEL[1] * rows + 0.6), layout="constrained", frameon=False
    )
    FigureCanvasSVG(figure)
    panels = figure.subplots(rows, across, squeeze=False)
    for panel in panels.flat:
        panel.patch.set_alpha(0.0)
        panel.grid(color=_GREY, alpha=0.3, linewidth=0.6)
        panel.tick_params(colors=_GREY, which="both")
        for spine in panel.spines.values():
            spine.set_color(_GREY)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(_GREY)
    return figure, panels


def _line(panel: Any, points: Sequence[tuple[float, float]], name: str, index: int) -> None:
    if not points:
        return
    ours = name == columns.OURS or name in columns.RECIPES
    panel.plot(
        *zip(*points, strict=True),
        color=_COLOURS[index % len(_COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4.5,
        linewidth=2.2 if ours else 1.2,
        label=name,
    )


def _lengths(panel: Any, lengths: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(lengths), [_short(n) for n in lengths])
    panel.minorticks_off()
    panel.set_xlabel("seq")


def _short(length: int) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if length >= size and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def _save(figure: Any, path: Path, about: str) -> None:
    import matplotlib

    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center",
        ncols=min(len(handles), 4), frameon=False, labelcolor=_GREY, title=about,
        title_fontproperties={"size": "x-small"},
    ).get_title().set_color(_GREY)  # fmt: skip
    # The same record gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _device(record: Mapping[str, Any]) -> str:
    return str(record["environment"]["devices"][-1])


_FIGURES: dict[
    str, tuple[str, Callable[[Sequence[Row]], list[Row]], Callable[[Sequence[Row]], Any]]
] = {
    "speed": ("forward", _of_paper, _speed),
    "error": ("forward", _with_errors, _error),
    "backward": ("backward", _of_paper, _speed),
    "fp8": ("fp8", _of_fp8, _speed),
    "io": ("io", list, _io),
    "growth": ("memory", _with_bytes, _growth),
}
"""By name: the bench, which of its rows, and how they are drawn."""
