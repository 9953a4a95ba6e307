"""Locks for work that threads must not do twice, usable again in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable


def after_fork(function: Callable[[], None]) -> None:
    """Call `function` in each child that is forked from now on, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


class KeyedLocks:
    """One lock for each key, so that threads wait only for those who do the same.

    A child gets fresh locks: the threads that might hold the parent's do not exist there.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self._renew)

    def _renew(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}

    def of(self, key: Hashable) -> threading.Lock:
        """The lock of a key."""
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())
