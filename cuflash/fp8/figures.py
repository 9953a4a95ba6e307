"""Figures of the 8-bit error: one function each, from records or from a block of keys to a file.

Needs matplotlib, which is imported when the first figure is drawn, and draws without a screen.
Colours are those of Okabe and Ito, which people with any common colour blindness can tell apart;
lines differ in their markers as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from .records import Record, Summary, summarise
from .sweeps import PUBLISHED

Array = np.ndarray[Any, Any]

FORMATS = ("png", "svg")

_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
)
_MARKERS = "osD^vP*X"
_LINES = ("-", "--", ":")  # the next for every eight lines, when colours begin anew
_MOST_PANELS = 6
_PERCENT = "relative L2 error (%)"
_METRIC_LABELS = {
    "rmse": "RMSE against float64 attention (unit of V)",
    "relative_l2": _PERCENT,
    "max_error": "largest error (unit of V)",
    "cosine": "1 - cosine similarity",
    "rmse_unrounded": "RMSE against float64 attention\non unrounded inputs (unit of V)",
}


@dataclass(frozen=True, slots=True)
class LineFigure:
    """How the records of a sweep are drawn as lines.

    Attributes
    ----------
    title, x_label : str
    metric : str
        One of `records.METRICS`; a relative error is drawn in percent, a cosine as its distance
        from 1.
    x_scale : str
        ``"linear"``, ``"log"``, ``"symlog"`` for numbers that begin with 0, ``"log2"``; or the
        settings in their order: ``"words"`` for those that grow, ``"kinds"`` for those that do not,
        which no line joins.
    """

    title: str
    x_label: str
    metric: str = "relative_l2"
    x_scale: str = "linear"


LINE_FIGURES = MappingProxyType(
    {
        "outlier": LineFigure(
            "Error by size of the outliers", "standard deviation of the outliers", x_scale="symlog"
        ),
        "probability": LineFigure(
            "Error by number of outliers", "probability of an outlier", x_scale="log"
        ),
        "channel": LineFigure(
            "Error by size of the largest K channel",
            "largest channel of K / other channels",
            x_scale="log",
        ),
        "kmean": LineFigure(
            "Error by spread of the channel means of K",
            "standard deviation of the channel means",
            metric="rmse",
            x_scale="symlog",
        ),
        "sink": LineFigure("Error by score of an attention sink", "mean score of the sink keys"),
        "length": LineFigure("Error by number of keys", "keys", metric="rmse", x_scale="log2"),
        "block": LineFigure(
            "Error by size of the blocks of Q and K that share a scale (f8: e4m3, i8: int8)",
            "block",
            x_scale="words",
        ),
        "rotation": LineFigure("Error by kind of rotation", "rotation", x_scale="kinds"),
        "balance": LineFigure("Error with and without balancing", "balancing", x_scale="kinds"),
        "centring": LineFigure(
            "Error by what is centred", "centred", metric="rmse", x_scale="kinds"
        ),
        "accumulation": LineFigure("Error by accumulation of PV", "accumulation", x_scale="kinds"),
        "p-scale": LineFigure(
            "Error by scale and reference of P", "scale, reference", x_scale="kinds"
        ),
        "dim": LineFigure("Error by head dim", "head dim", metric="rmse", x_scale="log2"),
    }
)
"""The figure of each sweep that is drawn as lines, by the name of the sweep."""


def missing_reason() -> str:
    """Why figures can't be drawn here; empty where they can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"figures need matplotlib, which can't be imported ({error})"
    return ""


def draw_all(records: Sequence[Record], folder: Path, form: str = "png") -> list[Path]:
    """Draw every figure that these records have data for.

    Parameters
    ----------
    records : sequence of Record
        Of any number of sweeps.
    folder : Path
        Made where it is missing; a figure's file is named after its sweep.
    form : str
        ``"png"`` or ``"svg"``.

    Returns
    -------
    list of Path
        The files, in the order in which their sweeps first come.

    Raises
    ------
    RuntimeError
        Where matplotlib is missing.
    ValueError
        For another format.
    """
    if form not in FORMATS:
        raise ValueError(f"format: got {form!r}; expected one of {', '.join(FORMATS)}")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for sweep in dict.fromkeys(record.sweep for record in records):
        mine = [record for record in records if record.sweep == sweep]
        path = folder / f"{sweep or 'errors'}.{form}"
        if sweep == "ablation" and any(record.inputs == "paper" for record in mine):
            draw_ablation(mine, path)
        elif sweep in LINE_FIGURES:
            draw_lines(mine, path, LINE_FIGURES[sweep])
        else:
            draw_inputs(mine, path)
        drawn.append(path)
    return drawn


def draw_lines(records: Sequence[Record], path: Path, figure: LineFigure) -> None:
    """Draw the error over the settings of a sweep: a panel for each input, a line for each recipe.

    Lines are medians over the seeds, bands reach from the 10 % to the 90 % quantile. Of more than
    six inputs, such as the layers of a model, medians and bands over all of them share one panel.

    Raises
    ------
    ValueError
        For no records.
    """
    _check_records(records)
    records = _pooled(records)
    summaries = summarise(records, figure.metric)
    inputs = list(dict.fromkeys(s.inputs for s in summaries))
    lines = list(dict.fromkeys(s.recipe for s in summaries))
    canvas, panels = _panels(len(inputs))
    words = list(dict.fromkeys(s.setting for s in summaries))
    for panel, name in zip(panels, inputs, strict=True):
        for index, line in enumerate(lines):
            chosen = [s for s in summaries if s.inputs == name and s.recipe == line]
            if not chosen:
                continue
            if figure.x_scale in ("words", "kinds"):
                places = [float(words.index(s.setting)) for s in chosen]
            else:
                chosen.sort(key=lambda s: _number(s.x))
                places = [_number(s.x) for s in chosen]
            if figure.x_scale == "kinds":
                _points_with_whiskers(panel, places, chosen, (index, len(lines)), line)
            else:
                _line_with_band(panel, places, chosen, index, line)
        _scale_x(panel, figure.x_scale, words, [_number(s.x) for s in summaries])
        panel.set_xlabel(figure.x_label)
        panel.set_title(name, fontsize="medium")
    _scale_y(panels[0], summaries)  # which the others share
    panels[0].set_ylabel(_METRIC_LABELS[figure.metric])
    _finish(canvas, panels[0], f"{figure.title}\n{_about(records)}", path, len(lines))


def draw_inputs(records: Sequence[Record], path: Path) -> None:
    """Draw the relative error of each recipe on each input: distributions, or layers of a model.

    Layers, which follow each other, are joined by lines.

    Raises
    ------
    ValueError
        For no records.
    """
    _check_records(records)
    summaries = summarise(records, "relative_l2")
    inputs = list(dict.fromkeys(s.inputs for s in summaries))
    recipes = list(dict.fromkeys(s.recipe for s in summaries))
    layers = all(name.startswith("layer ") for name in inputs)
    canvas, (panel,) = _panels(1, width=max(6.0, 0.35 * len(inputs) + 3.0))
    for index, recipe in enumerate(recipes):
        chosen = [s for s in summaries if s.recipe == recipe]
        places = [float(inputs.index(s.inputs)) for s in chosen]
        if layers:
            _line_with_band(panel, places, chosen, index, recipe)
        else:
            _points_with_whiskers(panel, places, chosen, (index, len(recipes)), recipe)
    panel.set_xticks(range(len(inputs)))
    shown = [name.removeprefix("layer ") for name in inputs] if layers else inputs
    panel.set_xticklabels(shown, rotation=0 if layers or len(inputs) < 7 else 45)
    panel.set_xlabel("layer" if layers else "distribution of q, k, v")
    panel.set_ylabel(_PERCENT)
    _scale_y(panel, summaries)
    title = "Error by layer of a model" if layers else "Error by distribution"
    _finish(canvas, panel, f"{title}\n{_about(records)}", path, len(recipes))


def draw_ablation(records: Sequence[Record], path: Path) -> None:
    """Draw the published RMSE of FlashAttention-3 beside ours on the same mixture, as bars.

    Ours are against float64 attention on the inputs before they were rounded; whiskers reach from
    the 10 % to the 90 % quantile of the seeds.

    Raises
    ------
    ValueError
        For no records of the distribution ``paper``.
    """
    mine = {
        s.recipe: s
        for s in summarise([r for r in records if r.inputs == "paper"], "rmse_unrounded")
    }
    if not mine:
        raise ValueError("records: none is of the distribution 'paper'")
    canvas, (panel,) = _panels(1, width=max(6.5, 1.25 * len(mine)))
    names = list(mine)
    width = 0.38
    known = [(i, PUBLISHED[name].rmse) for i, name in enumerate(names) if name in PUBLISHED]
    # A bar without a published one beside it stands in the middle.
    ours = [i + (width / 2 if name in PUBLISHED else 0.0) for i, name in enumerate(names)]
    published = [height for _, height in known]
    medians, tops = ([getattr(mine[n], field) for n in names] for field in ("median", "high"))
    for label, places, heights, ends, colour, hatch in (
        (
            "published (FlashAttention-3)",
            [i - width / 2 for i, _ in known],
            published,
            published,
            _COLOURS[7],
            "//",
        ),
        ("here, median", ours, medians, tops, _COLOURS[0], ""),
    ):
        panel.bar(places, heights, width, color=colour, hatch=hatch, edgecolor="white", label=label)
        for place, height, end in zip(places, heights, ends, strict=True):
            panel.annotate(
                f"{height:.1e}", (place, end), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize="x-small",
            )  # fmt: skip
    panel.vlines(ours, [mine[name].low for name in names], tops, color="black", linewidth=1)
    panel.set_yscale("log")
    panel.margins(y=0.15)
    panel.set_xticks(range(len(names)))
    panel.set_xticklabels(
        [
            PUBLISHED[name].name.replace(" ", "\n", 1) if name in PUBLISHED else name
            for name in names
        ],
        fontsize="small",
    )
    panel.set_ylabel(_METRIC_LABELS["rmse_unrounded"])
    panel.grid(axis="x", visible=False)
    title = "Numerical error on N(0, 1) + N(0, 100) · Bernoulli(0.001)"
    _finish(canvas, panel, f"{title}\n{_about(records)}", path, 2)


def kurtosis(x: Array) -> float:
    """Fourth central moment over the square of the second: 3 for normal numbers."""
    centred = x.astype(np.float64).ravel()
    centred -= centred.mean()
    return float(np.mean(centred**4) / np.mean(centred**2) ** 2)


def draw_key_block(block: Array, rotated: Array, path: Path, name: str = "") -> None:
    """Draw how the elements of a block of keys are distributed, before and after its rotation.

    Parameters
    ----------
    block, rotated : ndarray, (keys, dim)
        The same block; elements are shown in units of their root mean square.
    path : Path
        Ends in .png or .svg.
    name : str
        What the keys are, for the title.
    """
    canvas, panels = _panels(2)
    pairs = (("before rotation", block), ("after rotation", rotated))
    units = [
        x.astype(np.float64).ravel() / np.sqrt(np.mean(x.astype(np.float64) ** 2)) for _, x in pairs
    ]
    reach = max(4.0, *(float(np.abs(unit).max()) for unit in units))
    edges = np.linspace(-reach, reach, 101)
    normal_x = np.linspace(-reach, reach, 801)
    normal_y = np.exp(-0.5 * normal_x**2) / math.sqrt(2 * math.pi)
    floor = 0.5 / (block.size * (edges[1] - edges[0]))  # below the height of a single element
    for index, (panel, (when, x), unit) in enumerate(zip(panels, pairs, units, strict=True)):
        panel.hist(unit, edges, density=True, color=_COLOURS[index], label=when)
        panel.plot(
            normal_x, np.where(normal_y < floor, np.nan, normal_y), "k--", linewidth=1,
            label="normal" if index == 0 else None,
        )  # fmt: skip
        panel.set_yscale("log")
        panel.set_ylim(floor, 2)
        panel.set_xlabel("element / RMS of the block")
        panel.set_title(f"{when}: kurtosis {kurtosis(x):.2f}", fontsize="medium")
    panels[0].set_ylabel("density")
    about = f" of {name}" if name else ""
    title = f"A block of keys{about}, {block.shape[0]} keys of dim {block.shape[1]}"
    _finish(canvas, panels, title, path, 3)


def _panels(count: int, width: float | None = None) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width or (6.5 if count == 1 else 3.6 * count), 4.6))
    panels = canvas.subplots(1, count, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return canvas, list(panels)


def _finish(canvas: Any, labelled: Any, title: str, path: Path, entries: int) -> None:
    """Set title and the one legend, below everything, and write the file."""
    handles: dict[str, Any] = {}
    for panel in labelled if isinstance(labelled, list) else canvas.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    canvas.suptitle(title, fontsize="medium")
    columns = min(4, max(1, entries), max(1, int(canvas.get_figwidth() // 2)))
    canvas.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns,
        frameon=False, fontsize="small",
    )  # fmt: skip
    canvas.set_layout_engine("constrained")
    canvas.savefig(path, dpi=150)


def _line_with_band(
    panel: Any, places: Sequence[float], chosen: Sequence[Summary], index: int, label: str
) -> None:
    middle, low, high = (
        [_shown(s.metric, value) for s, value in zip(chosen, values, strict=True)]
        for values in (
            [s.median for s in chosen], [s.low for s in chosen], [s.high for s in chosen]
        )
    )  # fmt: skip
    style = _style(index)
    panel.plot(places, middle, label=label, **style)
    panel.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _points_with_whiskers(
    panel: Any,
    places: Sequence[float],
    chosen: Sequence[Summary],
    turn: tuple[int, int],
    label: str,
) -> None:
    """Points side by side: those of the `turn[0]`-th of `turn[1]` recipes."""
    index, count = turn
    spread = 0.5 * ((index + 0.5) / count - 0.5)
    middle = [_shown(s.metric, s.median) for s in chosen]
    ends = [sorted((_shown(s.metric, s.low), _shown(s.metric, s.high))) for s in chosen]
    below = [m - low for m, (low, _) in zip(middle, ends, strict=True)]
    above = [high - m for m, (_, high) in zip(middle, ends, strict=True)]
    panel.errorbar(
        [place + spread for place in places],
        middle,
        yerr=[below, above],
        capsize=2,
        label=label,
        **(_style(index) | {"linestyle": "none"}),
    )


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.4,
        "linestyle": _LINES[index // len(_COLOURS) % len(_LINES)],
    }


def _scale_x(panel: Any, scale: str, words: Sequence[str], values: Sequence[float]) -> None:
    if scale in ("words", "kinds"):
        panel.set_xticks(range(len(words)))
        tilted = max(map(len, words)) * len(words) > 30
        panel.set_xticklabels(
            words,
            fontsize="small",
            rotation=35 if tilted else 0,
            ha="right" if tilted else "center",
        )
        return
    ticks = sorted(set(values))
    if scale == "log2":
        panel.set_xscale("log", base=2)
    elif scale == "log":
        panel.set_xscale("log")
    elif scale == "symlog":
        above = [value for value in ticks if value > 0]
        panel.set_xscale("symlog", linthresh=min(above, default=1.0))
    panel.set_xticks(ticks, minor=False)
    panel.set_xticks([], minor=True)
    panel.set_xticklabels([f"{value:g}" for value in ticks], fontsize="small")


def _scale_y(panel: Any, summaries: Sequence[Summary]) -> None:
    """Logarithmic where the errors span more than a factor of 5, else from 0."""
    shown = [_shown(s.metric, s.median) for s in summaries]
    shown = [value for value in shown if math.isfinite(value) and value > 0]
    if not shown or max(shown) <= 5 * min(shown):
        panel.set_ylim(bottom=0)
        return
    panel.set_yscale("log")
    if summaries[0].metric == "relative_l2":
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())


def _shown(metric: str, value: float) -> float:
    if metric == "relative_l2":
        return 100 * value
    return 1 - value if metric == "cosine" else value


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def _pooled(records: Sequence[Record]) -> list[Record]:
    inputs = dict.fromkeys(record.inputs for record in records)
    if len(inputs) <= _MOST_PANELS:
        return list(records)
    together = f"{len(inputs)} inputs"
    return [dataclasses.replace(record, inputs=together) for record in records]


def _about(records: Sequence[Record]) -> str:
    """Shapes and seeds, for the title."""

    def span(name: str) -> str:
        values = sorted({getattr(record, name) for record in records})
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    seeds = len({record.seed for record in records})
    causal = "causal, " if records[0].causal else ""
    band = "; bands: 10 to 90 %" if seeds > 1 else ""
    return (
        f"{causal}keys {span('keys')}, dim {span('dim')}, heads {span('heads')}, rows of each "
        f"{span('rows')}, {seeds} {'seed' if seeds == 1 else 'seeds'}{band}"
    )


def _check_records(records: Iterable[Record]) -> None:
    if not list(records):
        raise ValueError("records: got none; expected at least one")
