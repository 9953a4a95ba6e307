"""Errors of one output against another, one record per measurement, and files of records."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..version import __version__

Array = np.ndarray[Any, Any]

METRICS = ("rmse", "relative_l2", "max_error", "cosine", "rmse_unrounded")


@dataclass(frozen=True, slots=True)
class Errors:
    """How far an output is from the exact one.

    Attributes
    ----------
    rmse : float
        Root of the mean of (got - exact)², in the unit of v.
    relative_l2 : float
        ||got - exact|| / ||exact|| over all elements; 0.05 is 5 %. NaN where the exact one is 0
        throughout and the other is not.
    max_error : float
        Largest |got - exact|, in the unit of v.
    cosine : float
        <got, exact> / (||got|| ||exact||) over all elements; 1 is the best.
    """

    rmse: float
    relative_l2: float
    max_error: float
    cosine: float


def errors(got: Array, exact: Array) -> Errors:
    """Measure `got` against `exact`, arrays of one shape, in float64. A NaN makes all four NaN.

    Raises
    ------
    ValueError
        For shapes that differ, or hold no element.
    """
    if got.shape != exact.shape or not exact.size:
        raise ValueError(
            f"got: shape {got.shape}; expected that of exact, {exact.shape}, not empty"
        )
    a, b = (x.astype(np.float64).ravel() for x in (got, exact))
    difference = a - b
    distance, size_a, size_b = (float(np.linalg.norm(x)) for x in (difference, a, b))
    if size_a == 0.0 or size_b == 0.0:
        cosine = 1.0 if size_a == size_b else 0.0
    else:
        cosine = float(a / size_a @ (b / size_b))
    missing = 0.0 if distance == 0.0 else math.nan
    return Errors(
        rmse=distance / math.sqrt(a.size),
        relative_l2=distance / size_b if size_b else missing,
        max_error=float(np.abs(difference).max()),
        cosine=cosine,
    )


@dataclass(frozen=True, slots=True)
class Record:
    """One recipe on one set of inputs.

    Attributes
    ----------
    sweep : str
        Name of the sweep, or ``""``.
    recipe : str
        Label of the recipe or baseline.
    inputs : str
        Name of the distribution, or of a layer of a file.
    setting : str
        What the sweep set, in words; ``""`` where nothing is swept.
    x : float or None
        The same as a number, where it has one.
    heads, rows, keys, dim : int
        Query heads, sampled query rows of each, keys, head dim.
    causal : bool
    seed : int
        Of the random inputs; for those of a file, of the sample of rows.
    rmse, relative_l2, max_error, cosine : float
        As in `Errors`, against float64 attention on the same float16 inputs.
    rmse_unrounded : float or None
        RMSE against float64 attention on the inputs before they were rounded to float16, where they
        are known.
    size : float
        RMS of the exact output, to which `rmse` may be compared.
    """

    sweep: str
    recipe: str
    inputs: str
    setting: str
    x: float | None
    heads: int
    rows: int
    keys: int
    dim: int
    causal: bool
    seed: int
    rmse: float
    relative_l2: float
    max_error: float
    cosine: float
    rmse_unrounded: float | None
    size: float


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
_INTEGERS = ("heads", "rows", "keys", "dim", "seed")
_WORDS = ("sweep", "recipe", "inputs", "setting")


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write one line per record after a line of names; a missing number is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for record in records:
            values = (getattr(record, name) for name in FIELDS)
            writer.writerow(["" if value is None else value for value in values])


def read_csv(path: Path) -> list[Record]:
    """Read what `write_csv` wrote: the same records.

    Raises
    ------
    ValueError
        For a file with other columns, or a field that is no number where one belongs.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(f"{path}: its columns are not {', '.join(FIELDS)}")
        return [Record(**{name: _value(name, row[name]) for name in FIELDS}) for row in reader]


def write_json(path: Path, records: Iterable[Record]) -> None:
    """Write an object: versions of cuflash and NumPy, and the records as a list of objects.

    A NaN is written as null, for JSON has none.
    """
    document = {
        "cuflash": __version__,
        "numpy": np.__version__,
        "records": [as_plain(record) for record in records],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Record]:
    """Read what `write_json` wrote.

    Raises
    ------
    ValueError
        For a file of another form.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["records"]
        return [
            Record(**{name: _restored(name, entry[name]) for name in FIELDS}) for entry in found
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no file of records: {error!r}") from None


def as_plain(record: Record) -> dict[str, Any]:
    """A record for JSON."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(record).items()
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """A metric of the records that differ in nothing but the seed.

    Attributes
    ----------
    sweep, recipe, inputs, setting, x, heads, rows, keys, dim, causal
        As in `Record`.
    metric : str
    seeds : int
        How many records.
    median, low, high : float
        The median, the 10 % and the 90 % quantile over the seeds (with linear interpolation), in
        the unit of the metric; NaN where one of the records is.
    """

    sweep: str
    recipe: str
    inputs: str
    setting: str
    x: float | None
    heads: int
    rows: int
    keys: int
    dim: int
    causal: bool
    metric: str
    seeds: int
    median: float
    low: float
    high: float


_SHARED = tuple(field.name for field in dataclasses.fields(Summary))[:10]


def summarise(records: Iterable[Record], metric: str = "relative_l2") -> list[Summary]:
    """Gather the seeds of each measurement, in the order in which they first come.

    Records that lack the metric (`rmse_unrounded` of a file's inputs) are left out.

    Raises
    ------
    ValueError
        For an unknown metric.
    """
    if metric not in METRICS:
        raise ValueError(f"metric: got {metric!r}; expected one of {', '.join(METRICS)}")
    groups: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        value = getattr(record, metric)
        if value is not None:
            groups.setdefault(tuple(getattr(record, name) for name in _SHARED), []).append(value)
    found = []
    for shared, values in groups.items():
        low, median, high = map(float, np.quantile(values, (0.1, 0.5, 0.9)))
        found.append(
            Summary(
                **dict(zip(_SHARED, shared, strict=True)),
                metric=metric,
                seeds=len(values),
                median=median,
                low=low,
                high=high,
            )
        )
    return found


def _value(name: str, text: str) -> Any:
    if name in _WORDS:
        return text
    if name == "causal":
        if text not in ("True", "False"):
            raise ValueError(f"causal: got {text!r}; expected True or False")
        return text == "True"
    try:
        if name in _INTEGERS:
            return int(text)
        return None if text == "" and name in ("x", "rmse_unrounded") else float(text)
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; expected a number") from None


def _restored(name: str, value: Any) -> Any:
    return math.nan if value is None and name not in ("x", "rmse_unrounded") else value
