"""Counters by which tiles of keys add to dQ in turn, for the same bits run after run.

`cuda_src/common/turns.cuh` has them; the kernel that prepares rows sets all to 0.
"""

from __future__ import annotations

_FIRST = 32  # FIRST_TURN: counters before those of turns, of which the first counts tickets


def counters_size(turns: int) -> int:
    """Bytes of the counters of so many parts of dQ, and of those before them."""
    return 4 * (_FIRST + turns)
