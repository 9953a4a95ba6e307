"""Which rows the statistics are of that need not be exact.

Attention stays as it is whatever is taken from all keys and whatever a channel of q is multiplied
and of k divided by, so k's mean and the sizes for balance may come from some rows: from so many
that the difference is far below the rounding to 8 bits. The largest sizes, which scales come from,
and v's mean, which is added again, are those of all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RUN = 16  # neighbouring rows that are taken together
FEWEST = 2048  # rows of a head that are taken, where there are as many
_FACTORS = 0x9E3779B1, 0x85EBCA77  # odd, by which bits get about


def spacing(length: int) -> int:
    """Of how many runs of a head one is taken, a power of two: 1 below 4,096 rows."""
    return 1 << (max(length // FEWEST, 1).bit_length() - 1)


def runs(length: int) -> int:
    """How many are taken of so many rows."""
    return -(-length // (RUN * spacing(length)))


def sampled(length: int) -> np.ndarray[Any, Any]:
    """The rows that are taken, in their order.

    Of each group of `spacing` runs it is one as if drawn by lot: what repeats along the rows, as
    rotary embeddings do, is met at all its phases.
    """
    every = spacing(length)
    group = np.arange(runs(length), dtype=np.uint32)
    lot = group * np.uint32(_FACTORS[0])
    lot = (lot ^ lot >> 15) * np.uint32(_FACTORS[1])
    within = (lot.astype(np.uint64) * every) >> 32
    first = (group * np.uint64(every) + within).astype(np.int64) * RUN
    rows = (first[:, None] + np.arange(RUN)).ravel()
    found: np.ndarray[Any, Any] = rows[rows < length]
    return found
