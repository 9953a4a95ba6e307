"""Attention and its backward pass: planned once a kind, run by the family that the plan has."""

from __future__ import annotations

from typing import Any

from . import families
from .arrays import fill_zero
from .dispatch import choose
from .kinds import Kind, keep
from .operands import Operands, adopt_backward, spec_of
from .plan import log_once
from .runtime.device import activate
from .spec import Options


class Call(Kind):
    """Calls of `attention` of one kind."""

    def __init__(self, operands: Operands, options: Options) -> None:
        """Check and plan a first call of the kind; nothing is compiled, loaded or allocated."""
        spec = spec_of(operands, options)
        super().__init__(operands, spec)
        self.plan = choose(spec, self.device, options.kernel)

    def prepare(self) -> None:
        """Load what the kind needs."""
        if not self._spec.is_empty:
            with activate(self.device):
                self._run = families.load(self.plan.family).prepare(self.plan)


class VjpCall(Call):
    """A forward call whose gradients will be asked for, so that a family has to take those too."""

    def __init__(self, operands: Operands, options: Options) -> None:
        """As of any call; refused where no family can run the backward pass."""
        super().__init__(operands, options)
        backward = adopt_backward(operands, None, None, None, None, None, stand_ins=True)
        choose(spec_of(backward, options), self.device, options.kernel)


class BackwardCall(Call):
    """What all backward passes of one kind share."""

    def prepare(self) -> None:
        """Load what the kind needs."""
        if self._spec.is_empty:
            self._run = _zero_gradients
        else:
            with activate(self.device):
                self._run = families.load_backward(self.plan.family).prepare(self.plan)

    def _compute(self, operands: Any) -> None:
        for name in operands.DESTINATIONS:
            if getattr(operands, name) is None:
                shape = getattr(operands, name[1:]).shape  # dq is like q
                setattr(operands, name, self._empty(shape, self._dtype))
        self._run(operands)


def add(
    key: tuple[Any, ...], operands: Operands, options: Options, kind: type[Call] = Call
) -> Call:
    """Check, plan and prepare a first call with a key. `options` are those that are no arrays."""
    call = kind(operands, options)
    call.check(operands)
    log_once(call.plan)
    call.prepare()
    keep(key, call, options)
    return call


def _zero_gradients(operands: Any) -> None:
    """Runs a backward pass without a row of `dout`."""
    for name in operands.DESTINATIONS:
        fill_zero(getattr(operands, name))
