"""Calls of one kind, which are checked, described and prepared once.

Checking and describing a call takes the host many times as long as launching it. What of that
depends on neither values nor addresses is the same for all calls with one key; the rest is checked
at each call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import address, maker_of, may_overlap, module_of, reach
from .operands import Operands
from .runtime.device import activate, current_index, of_array
from .runtime.locks import after_fork
from .spec import AttentionSpec, Options
from .validate import check_length_values

_MOST = 4096  # kinds kept; a growing KV cache makes one more at each step
# Options of other types may change, or equal what is refused; such a call is checked each time.
_LASTING = (type(None), int, float, str, np.generic)


class Kind:
    """What calls of one kind share, whatever they compute."""

    def __init__(self, operands: Operands, spec: AttentionSpec) -> None:
        self.device = of_array(spec.device)
        self._index, self._current_index = self.device.index, current_index(self.device)
        self._spec = spec
        self._empty = maker_of(operands.q)
        self._out_shape, self._dtype = (*operands.q.shape[:-1], spec.head_dim_v), operands.q.dtype
        lse_shape = (spec.batch, spec.q_heads, spec.q_len)[4 - operands.q.ndim :]
        self._lse_shape = lse_shape if spec.return_lse else None
        self._lse_dtype = np.float64 if spec.dtype == "float64" else np.float32
        self._checks = [*_length_checks(operands, spec), *_destination_checks(operands)]
        self._run: Callable[[Operands], None] = _nothing_to_compute

    def check(self, operands: Operands) -> None:
        """Check what depends on the values and addresses of a call.

        Raises
        ------
        ValueError
            For lengths that the arrays do not have, and for an array to be written that can't be
            or shares memory with another.
        """
        for check in self._checks:
            check(operands)

    def run(self, operands: Operands) -> None:
        """Compute the results of one call, allocated here where needed."""
        for check in self._checks:
            check(operands)
        if self._current_index() == self._index:
            self._compute(operands)
        else:
            with activate(self.device):
                self._compute(operands)

    def _compute(self, operands: Operands) -> None:
        if operands.out is None:
            operands.out = out = self._empty(self._out_shape, self._dtype)
            if operands.starts:
                q, k, v, _ = operands.starts
                operands.starts = q, k, v, out.data.ptr
        if self._lse_shape is not None:
            operands.lse = self._empty(self._lse_shape, self._lse_dtype)
        self._run(operands)


_kinds: dict[Any, Any] = {}
_latest: tuple[Any, Any] = None, None  # the key found last, and its kind


def forget() -> None:
    """Drop every kind of call met so far."""
    global _latest
    _kinds.clear()
    _latest = None, None


after_fork(forget)


def find(key: tuple[Any, ...]) -> Any:
    """The calls with a key, if there was one before.

    The latest key is compared first: calls of one kind come in a row, and to compare takes less
    time than to hash.
    """
    global _latest
    latest, call = _latest
    if key == latest:
        return call
    try:
        call = _kinds.get(key)
    except TypeError:  # something in it can't be hashed
        return None
    if call is not None:
        _latest = key, call
    return call


def key_of(kind: type, operands: Operands, options: Options) -> tuple[Any, ...]:
    """All that the checks and the plan depend on; with types, because 1 == 1.0 == True. They come
    first, so that values are compared with values of their own types only.
    """
    window = options.window
    types = (*map(type, options), *(map(type, window) if type(window) is tuple else ()))
    return (kind, operands.fingerprints(), types, options)


def keep(key: tuple[Any, ...], call: Any, options: Options) -> None:
    """Have `find` find a kind by its key, of which `options` are a part."""
    if all(map(_is_lasting, options)):
        if len(_kinds) >= _MOST:
            _kinds.clear()
        with contextlib.suppress(TypeError):  # as in find
            _kinds[key] = call


def _is_lasting(option: Any) -> bool:
    """Whether an option keeps its value for as long as it equals itself."""
    return isinstance(option, _LASTING) or (type(option) is tuple and all(map(_is_lasting, option)))


def _starts_of(names: list[str], operands: Operands) -> Callable[[Operands], tuple[int, ...]]:
    """What tells where operands of this kind, two at least, start in memory."""
    if isinstance(getattr(operands, names[0]), np.ndarray):
        return lambda given: tuple([address(getattr(given, name)) for name in names])
    if operands.starts and names == ["q", "k", "v", "out"]:
        return operator.attrgetter("starts")
    return operator.attrgetter(*(f"{name}.data.ptr" for name in names))


def _length_checks(operands: Operands, spec: AttentionSpec) -> list[Callable[[Operands], None]]:
    """For lengths that were given, what checks their values."""
    checks: list[Callable[[Operands], None]] = []
    if operands.q_lens is not None:
        checks.append(lambda given: check_length_values("q_lens", given.q_lens, spec.q_len))
    if operands.kv_lens is not None:
        checks.append(lambda given: check_length_values("kv_lens", given.kv_lens, spec.kv_len))
    return checks


def _destination_checks(operands: Operands) -> list[Callable[[Operands], None]]:
    """For each array to write that was given, what checks that it can be written, and shares no
    memory with what is read or is written before it.
    """
    given = [name for name in operands.DESTINATIONS if getattr(operands, name) is not None]
    return [
        _destination_check(name, (*operands.INPUTS, *given[:at]), operands)
        for at, name in enumerate(given)
    ]


def _destination_check(
    name: str, others: tuple[str, ...], operands: Operands
) -> Callable[[Operands], None]:
    destination = getattr(operands, name)
    on_host = isinstance(destination, np.ndarray)
    low, high = reach(destination)
    near = [
        other
        for other in others
        # Lengths of the host lie elsewhere than an output on the device.
        if (array := getattr(operands, other)) is not None
        and module_of(array) is module_of(destination)
    ]
    starts_of = _starts_of([*near, name], operands)
    # Which others could clash with it, and between which distances from it they do.
    clashes = [
        (index, other, low - end, high - first)
        for index, other in enumerate(near)
        for first, end in [reach(getattr(operands, other))]
    ]

    def check(operands: Operands) -> None:
        if on_host and not getattr(operands, name).flags.writeable:
            raise ValueError(f"{name}: got a read-only array; expected one that can be written")
        starts = starts_of(operands)
        start = starts[-1]
        for index, other, low, high in clashes:
            if low < starts[index] - start < high and may_overlap(
                getattr(operands, name), getattr(operands, other)
            ):
                raise ValueError(f"{name}: shares memory with {other}; expected memory of its own")

    return check


def _nothing_to_compute(operands: Operands) -> None:
    """Runs a call without an output element."""
