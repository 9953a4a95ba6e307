"""The CPU family with other tile sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from cuflash import dispatch


@contextmanager
def tile_sizes(module: ModuleType, scores: int, keys: int) -> Iterator[None]:
    """Plan with them; plans made before are forgotten, and these afterwards."""
    dispatch._choose.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_SCORES", scores)
        patch.setattr(module, "_TILE_KEYS", keys)
        yield
    dispatch._choose.cache_clear()
