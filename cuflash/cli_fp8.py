"""The command about the error of 8-bit attention: `cuflash fp8-error`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .cli_shared import list_examples, words
from .fp8 import experiment, figures, records, sweeps
from .fp8.distributions import DISTRIBUTIONS
from .fp8.recipe import PRESETS
from .fp8.rotation import rotation_of
from .runtime import progress

NAME = "fp8-error"

_RECIPES = ("fp16", *PRESETS)
_HEADS, _KEYS, _DIM, _ROWS = 2, 4096, 128, 128
_BLOCK_KEYS = 128
# A table with more columns than this is turned on its side.
_MOST_COLUMNS = 12
_PERCENT_METRIC = "relative_l2"
_METRIC_TITLES = {
    "rmse": "RMSE",
    "relative_l2": "relative L2 error in %",
    "max_error": "largest error",
    "cosine": "1 - cosine similarity",
    "rmse_unrounded": "RMSE against the unrounded inputs",
}


def add_parser(commands: Any) -> None:
    """The parser of `cuflash fp8-error`."""
    summary = "errors of 8-bit attention against float64, on random or given q, k, v"
    command: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. Runs on the CPU.",
        epilog=_sweep_list()
        + "\n\n"
        + list_examples(
            "cuflash fp8-error --sweep ablation --heads 6 --seeds 5",
            "cuflash fp8-error --distribution paper,sink12 --recipe fa3,f8,i8+ --causal",
            "cuflash fp8-error --recipe f8,f8:rotation=none:balance=false --distribution chanK",
            "cuflash fp8-error --sweep all --figures figures --csv errors.csv",
            "cuflash fp8-error --npz layers.npz --causal --layers 0,6,12 --json errors.json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--sweep",
        type=words(("all", *sweeps.SWEEPS)),
        default=(),
        metavar="NAME[,NAME]",
        help="what to vary, or all; default: nothing, but every recipe on every distribution",
    )
    command.add_argument(
        "--distribution",
        type=_texts,
        default=(),
        metavar="NAME[,NAME]",
        help=f"of {', '.join(DISTRIBUTIONS)}, sinkX; default: all, or those of the sweep",
    )
    command.add_argument(
        "--recipe",
        type=_recipes,
        default=(),
        metavar="NAME[,NAME]",
        help=f"of fp16, fp16-standard, {', '.join(PRESETS)}; each may be followed by "
        ":FIELD=VALUE; default: all, or those of the sweep",
    )
    command.add_argument("--dim", type=_count, metavar="N", help=f"head dim; default {_DIM}")
    command.add_argument("--seq", type=_count, metavar="N", help=f"keys; default {_KEYS}")
    command.add_argument("--heads", type=_count, metavar="N", help=f"default {_HEADS}")
    command.add_argument(
        "--rows",
        type=_count,
        metavar="N",
        help=f"query rows of each head, a sample of all; default {_ROWS}",
    )
    command.add_argument(
        "--seeds", type=_count, default=3, metavar="N", help="sets of inputs; default 3"
    )
    command.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="the first of them; default 0"
    )
    command.add_argument("--causal", action="store_true")
    command.add_argument(
        "--metric", choices=records.METRICS, default=_PERCENT_METRIC, help="shown in the table"
    )
    command.add_argument(
        "--npz",
        type=Path,
        metavar="FILE",
        help="take q, k, v from here: arrays q, k, v or q_0, k_0, v_0 and so on",
    )
    command.add_argument("--layers", type=_texts, default=(), metavar="N[,N]", help="of --npz")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the records as JSON")
    command.add_argument("--csv", type=Path, metavar="FILE", help="write the records as CSV")
    command.add_argument(
        "--figures", type=Path, metavar="DIR", help="draw the records (needs matplotlib)"
    )
    command.add_argument("--format", choices=figures.FORMATS, default=figures.FORMATS[0])
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run `cuflash fp8-error`; returns the exit status."""
    _check_outputs(options)
    tasks = _tasks(options)
    total = sum(len(task.measurements) for task in tasks)
    measured = []
    with progress.bar(total) as step:
        for record in experiment.run(tasks):
            measured.append(record)
            now = (record.sweep, record.inputs, record.setting, record.recipe)
            step(" ".join(filter(None, now)))
    if options.csv:
        records.write_csv(options.csv, measured)
    if options.json:
        records.write_json(options.json, measured)
    print(report(measured, options.metric))
    beyond = _beyond_limits(measured)
    if "limits" in {record.sweep for record in measured}:
        print("\n".join(beyond) or "all within their limits")
    if options.figures:
        drawn = figures.draw_all(measured, options.figures, options.format)
        drawn.append(_draw_keys(tasks[0], options.figures / f"keys.{options.format}"))
        print("\n" + "\n".join(f"drawn: {path}" for path in drawn))
    return 1 if beyond else 0


def report(measured: Sequence[records.Record], metric: str = _PERCENT_METRIC) -> str:
    """Tables of the medians over the seeds, one for each sweep; the ablation beside the published
    numbers.
    """
    parts = []
    for sweep in dict.fromkeys(record.sweep for record in measured):
        mine = [record for record in measured if record.sweep == sweep]
        published = sweep == "ablation" and {record.inputs for record in mine} == {"paper"}
        if published and metric == _PERCENT_METRIC:
            parts.append(_ablation_table(mine))
        else:
            parts.append(_sweep_table(mine, metric))
    return "\n\n".join(parts)


def _beyond_limits(measured: Sequence[records.Record]) -> list[str]:
    """What the sweep over limits found too large, a NaN included."""
    found = records.summarise(record for record in measured if record.sweep == "limits")
    return [
        f"beyond its limit: {s.recipe} on {s.inputs}, {_cell(s.metric, s.median)} % > "
        f"{_cell(s.metric, limit)} %"
        for s in found
        if (limit := sweeps.LIMITS.get(s.recipe, {}).get(s.inputs)) is not None
        and not s.median <= limit
    ]


def _check_outputs(options: argparse.Namespace) -> None:
    """What would otherwise fail after minutes of work."""
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: got {path}; there is no folder {path.absolute().parent}")
        if path and path.is_dir():
            raise ValueError(f"--{name}: got {path}, which is a folder; expected a file")
    if options.figures:
        above = (options.figures, *options.figures.absolute().parents)
        if not next(path for path in above if path.exists()).is_dir():
            raise ValueError(f"--figures: got {options.figures}, which is no folder")
        if reason := figures.missing_reason():
            raise RuntimeError(f"--figures: {reason}")


def _tasks(options: argparse.Namespace) -> list[experiment.Task]:
    chosen: list[sweeps.Sweep | None] = [sweeps.SWEEPS[n] for n in options.sweep if n != "all"]
    everything = "all" in options.sweep
    if everything:  # limits are those of full attention
        chosen = [s for s in sweeps.SWEEPS.values() if s.name != "limits" or not options.causal]
    recipes = options.recipe if options.sweep else options.recipe or _RECIPES
    seeds = range(options.seed, options.seed + options.seeds)
    sizes = {"heads": options.heads, "seq": options.seq, "dim": options.dim}
    shape = experiment.Shape(
        heads=options.heads or _HEADS,
        keys=options.seq or _KEYS,
        dim=options.dim or _DIM,
        rows=options.rows or _ROWS,
        causal=options.causal,
    )
    if not everything:
        _check_settled(options, [sweep for sweep in chosen if sweep])
    if options.npz is None:
        if options.layers:
            raise ValueError("--layers: needs --npz")
        distributions = options.distribution or (() if options.sweep else tuple(DISTRIBUTIONS))
        return [
            task
            for sweep in chosen or [None]
            for task in experiment.plan_random(
                shape,
                seeds,
                sweep,
                recipes,
                () if everything and sweep and sweep.about_inputs else distributions,
            )
        ]
    given = [name for name, value in (*sizes.items(), ("distribution", options.distribution))]
    for name in given:
        if getattr(options, name):
            raise ValueError(f"--{name}: is settled by the file of --npz")
    layers = _layers(options)
    if everything:
        chosen = [s for s in chosen if s and not s.about_inputs and not s.about_shapes]
    return [
        task
        for sweep in chosen or [None]
        for task in experiment.plan_layers(layers, shape, seeds, sweep, recipes)
    ]


def _check_settled(options: argparse.Namespace, chosen: Sequence[sweeps.Sweep]) -> None:
    """Options that a sweep would pass over."""
    for sweep in chosen:
        for option, field in (
            ("seq", "keys"),
            ("dim", "dim"),
            ("heads", "heads"),
            ("rows", "rows"),
        ):
            if field in sweep.settings[0].shape and getattr(options, option):
                raise ValueError(f"--{option}: is settled by the sweep {sweep.name!r}")
        if sweep.name == "limits" and options.causal:
            raise ValueError("--causal: the sweep 'limits' is about full attention")


def _layers(options: argparse.Namespace) -> list[experiment.LayerSource]:
    found = experiment.layers_of(options.npz)
    if not options.layers:
        return found
    names = [layer.name.removeprefix("layer ") for layer in found]
    for wanted in options.layers:
        if wanted not in names:
            raise ValueError(f"--layers: got {wanted!r}; {options.npz} has {', '.join(names)}")
    return [found[names.index(wanted)] for wanted in options.layers]


def _draw_keys(task: experiment.Task, path: Path) -> Path:
    """The first keys of the first head of a task, as they are and rotated as the recipes do."""
    block = task.source.problem(task.shape, task.seed).k[0, :_BLOCK_KEYS].astype(np.float32)
    rotation = rotation_of(PRESETS["f8"], block.shape[1], 1)
    figures.draw_key_block(block, rotation.apply(block[None])[0], path, task.source.name)
    return path


def _sweep_table(measured: Sequence[records.Record], metric: str) -> str:
    """Settings, or without them inputs, as columns, and recipes as rows; turned where too wide."""
    found = records.summarise(measured, metric)
    if not found:
        raise ValueError(f"--metric: got {metric!r}, but these inputs are float16 as they come")
    first = measured[0]
    settings = list(dict.fromkeys(s.setting for s in found))
    inputs = list(dict.fromkeys(s.inputs for s in found))
    recipes = list(dict.fromkeys(s.recipe for s in found))
    cells = {(s.inputs, s.recipe, s.setting): _cell(metric, s.median) for s in found}
    if len(settings) > 1:
        rows = [
            [name, recipe, *(cells.get((name, recipe, setting), "-") for setting in settings)]
            for name in inputs
            for recipe in recipes
            if any((name, recipe, setting) in cells for setting in settings)
        ]
        head = ["inputs", "recipe", *settings]
    else:
        (setting,) = settings
        head = ["recipe", *inputs]
        rows = [[r, *(cells.get((name, r, setting), "-") for name in inputs)] for r in recipes]
        if first.sweep == "limits" and metric == _PERCENT_METRIC:
            rows = [line for row in rows for line in (row, _limits(row[0], inputs)) if line]
            recipes = []  # a mean would have no limit
        if len(inputs) > 1 and recipes:
            head.append("RMS")
            for row, recipe in zip(rows, recipes, strict=True):
                medians = [s.median for s in found if s.recipe == recipe]
                row.append(_cell(metric, float(np.sqrt(np.mean(np.square(medians))))))
        if len(head) > _MOST_COLUMNS + 2:
            head, *rows = [list(line) for line in zip(head, *rows, strict=True)]
    title = first.sweep if first.sweep not in sweeps.SWEEPS else sweeps.SWEEPS[first.sweep].summary
    lead = f"{first.sweep}: {title}; " if title else ""
    return (
        f"{lead}{_METRIC_TITLES[metric]}{_seeds(found)}\n{_about(measured)}\n{_lay_out(head, rows)}"
    )


def _limits(recipe: str, inputs: Sequence[str]) -> list[str]:
    """A line of limits, or nothing for a recipe that has none."""
    limits = sweeps.LIMITS.get(recipe)
    if limits is None:
        return []
    shown = (_cell(_PERCENT_METRIC, limits[name]) if name in limits else "-" for name in inputs)
    return ["  at most", *shown]


def _ablation_table(measured: Sequence[records.Record]) -> str:
    unrounded = records.summarise(measured, "rmse_unrounded")
    relative = {s.recipe: s.median for s in records.summarise(measured, _PERCENT_METRIC)}
    rows = []
    for summary in unrounded:
        known = sweeps.PUBLISHED.get(summary.recipe)
        rows.append(
            [
                known.name if known else summary.recipe,
                f"{known.rmse:.1e}" if known else "-",
                *(f"{value:.2e}" for value in (summary.median, summary.low, summary.high)),
                f"{summary.median / known.rmse:.2f}" if known else "-",
                _cell(_PERCENT_METRIC, relative[summary.recipe]),
            ]
        )
    head = ["recipe", "published", "here", "10 %", "90 %", "here / published", "relative L2 %"]
    return (
        "ablation: RMSE on N(0, 1) + N(0, 100) · Bernoulli(0.001) against float64 on the unrounded "
        f"inputs{_seeds(unrounded)}; published: FlashAttention-3\n"
        f"{_about(measured)}\n{_lay_out(head, rows)}"
    )


def _seeds(found: Sequence[records.Summary]) -> str:
    seeds = max(summary.seeds for summary in found)
    return f", median of {seeds} seeds" if seeds > 1 else ""


def _about(measured: Sequence[records.Record]) -> str:
    def span(name: str) -> str:
        values = sorted({getattr(record, name) for record in measured})
        return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"

    return (
        f"keys {span('keys')}, dim {span('dim')}, heads {span('heads')}, rows of each "
        f"{span('rows')}, {'causal' if measured[0].causal else 'full'}"
    )


def _cell(metric: str, value: float) -> str:
    if metric == _PERCENT_METRIC:
        return f"{100 * value:.3g}"
    return f"{1 - value:.1e}" if metric == "cosine" else f"{value:.2e}"


def _lay_out(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; words to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = [all(_is_word(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_word(cell: str) -> bool:
    return cell != "-" and not cell.lstrip("-")[:1].isdigit() and cell != "nan"


def _sweep_list() -> str:
    return "sweeps:\n" + "\n".join(
        f"  {name:<13} {sweep.summary}" for name, sweep in sweeps.SWEEPS.items()
    )


def _texts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def _recipes(text: str) -> tuple[str, ...]:
    for part in _texts(text):
        try:
            sweeps.parse_recipe(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("recipe: ")) from None
    return _texts(text)


def _integer_from(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a whole number of {least} or more"
            )
        return int(text)

    return parse


_count = _integer_from(1)
_seed = _integer_from(0)
