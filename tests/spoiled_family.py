"""A family whose results are spoiled after it has finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def spoil_results(
    patch: pytest.MonkeyPatch, family: Any, spoil: Callable[[Any, Any], None]
) -> None:
    """From now on `spoil(plan, operands)` follows each run of what `family` prepares."""
    right = family.prepare

    def prepare(plan: Any) -> Callable[[Any], None]:
        run = right(plan)

        def run_and_spoil(operands: Any) -> None:
            run(operands)
            spoil(plan, operands)

        return run_and_spoil

    patch.setattr(family, "prepare", prepare)
