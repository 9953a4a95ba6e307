"""What is measured: each module makes calls of one library, in a process of its own.

A module has

- ``versions(**options)``: versions of what it calls, by name; raises where that is missing
- ``make(problem, q, k, v, **options)``: a `Prepared`; raises `Unsupported` with a reason where the
  library does not take the problem. Arrays are of NumPy or CuPy, (batch, heads, seq, dim)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Unsupported(Exception):
    """The library does not take a problem; says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that queues one measured piece of work, and what came of the last one.

    `result` is the (batch, heads, seq, dim) array to judge, or None where there is nothing to.
    `work` has what a call does where that is not the problem's attention: ``"flops"`` or
    ``"bytes"``. `held` is how many bytes were allocated for results before the call.
    """

    call: Callable[[], Any]
    result: Callable[[], Any] | None = None
    note: str = ""
    work: dict[str, float] = field(default_factory=dict)
    held: int = 0
