"""Counters by which blocks of a backward kernel wait for each other: where tiles of keys add to dQ
in turn, for the same bits run after run, and where dQ of a section is set to 0.

`cuda_src/common/turns.cuh` has them; the kernel that prepares rows sets all to 0.
"""

from __future__ import annotations

_FIRST = 32  # FIRST_TURN: counters before those of turns, of which the first counts tickets


def counters_size(count: int) -> int:
    """Bytes of so many counters, of parts of dQ or of sections, and of those before them."""
    return 4 * (_FIRST + count)
