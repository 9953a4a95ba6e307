"""What many times of one thing come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance of the quartiles in parts of it; of one time, 0.

    Raises
    ------
    ValueError
        For no times, and for ones that are not above 0.
    """
    if not times or min(times) <= 0:
        raise ValueError(f"times: got {list(times)}; expected one or more above 0")
    middle = statistics.median(times)
    if len(times) == 1:
        return middle, 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The exponent e of ``value ~ size ** e`` by least squares of logarithms, and its standard
    error.

    Raises
    ------
    ValueError
        For fewer than three points, or ones that are not above 0.
    """
    if len(sizes) != len(values) or len(sizes) < 3 or min(*sizes, *values) <= 0:
        raise ValueError(
            f"got {len(sizes)} sizes, {len(values)} values; expected 3 or more above 0"
        )
    x, y = [math.log(n) for n in sizes], [math.log(n) for n in values]
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    centre = statistics.fmean(x)
    width = sum((a - centre) ** 2 for a in x)
    return slope, math.sqrt(rest / (len(x) - 2) / width)
