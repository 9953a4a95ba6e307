"""Calls of `attention` of one kind: planned once, and run by the family that the plan has."""

from __future__ import annotations

import logging
import os
from typing import Any

from . import families
from .dispatch import choose
from .kinds import Kind, keep
from .operands import Operands, spec_of
from .plan import Plan
from .runtime.device import activate
from .spec import Options

_log = logging.getLogger("cuflash")
_logged: set[Plan] = set()


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


def add(key: tuple[Any, ...], operands: Operands, options: Options) -> Call:
    """Check, plan and prepare a first call with a key. `options` are those that are no arrays."""
    call = Call(operands, options)
    call.check(operands)
    _log_once(call.plan)
    call.prepare()
    keep(key, call, options)
    return call


def _log_once(plan: Plan) -> None:
    """With CUFLASH_LOG=1 in the environment, log each plan the first time it is used."""
    if os.environ.get("CUFLASH_LOG", "0") in ("", "0") or plan in _logged:
        return
    _logged.add(plan)
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.info("%s", plan)
