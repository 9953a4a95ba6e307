"""One line on a terminal for work that may take long, gone when the work is done."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ERASE = "\r\x1b[K"
_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1


@contextmanager
def shown(message: str, after: float) -> Iterator[None]:
    """Show `message` on standard error while the block runs longer than `after` seconds.

    Nothing where standard error is not a terminal.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(after):
            return
        stream.write(f"{_ERASE}{message}")
        stream.flush()
        done.wait()
        stream.write(_ERASE)
        stream.flush()

    thread = threading.Thread(target=show, name="cuflash-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show on standard error how far the block is; it calls what it is given after each of `total`
    steps, with a few words on that step.

    Nothing where standard error is not a terminal.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield lambda words: None
        return
    start = time.monotonic()
    state = {"done": -1, "shown": -math.inf}

    def step(words: str) -> None:
        state["done"] += 1
        now = time.monotonic()
        done = int(state["done"])
        if now - state["shown"] < _REDRAW_SECONDS and done < total:
            return
        state["shown"] = now
        filled = _BAR_WIDTH * done // max(total, 1)
        left = f", {(now - start) * (total - done) / done:.0f} s left" if done else ""
        line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done}/{total}{left}  {words}"
        stream.write(_ERASE + line[: shutil.get_terminal_size().columns - 1])
        stream.flush()

    step("")
    try:
        yield step
    finally:
        stream.write(_ERASE)
        stream.flush()
