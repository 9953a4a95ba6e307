"""One line on a terminal for work that may take long, gone when the work is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ERASE = "\r\x1b[K"


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
