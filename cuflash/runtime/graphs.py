"""CUDA graphs: what a captured call allocates for itself has to stay, for its graph runs whenever
it likes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .locks import after_fork

_kept: list[Any] = []  # never given back: nobody tells when a graph is gone
after_fork(_kept.clear)


def is_capturing() -> bool:
    """Whether what the current stream is given becomes a part of a graph."""
    from cupy.cuda import get_current_stream

    stream = get_current_stream()
    return bool(stream.ptr) and bool(stream.is_capturing())  # the legacy default stream never is


def keep(memory: Any) -> None:
    """Keep memory for good if the current call is captured: its launches write there again."""
    if is_capturing():
        _kept.append(memory)


def lengths_on_device(name: str, lengths: Any) -> Any:
    """Used lengths as kernels read them: int64 next to each other on the current device.

    Those of the host are copied, without waiting.

    Raises
    ------
    ValueError
        For lengths of the host in a captured call, of which a graph would read what is there when
        it runs.
    """
    import cupy

    if isinstance(lengths, np.ndarray) and is_capturing():
        raise ValueError(
            f"{name}: got lengths in host memory while a CUDA graph is captured; expected an array "
            "on the device"
        )
    found = cupy.ascontiguousarray(cupy.asarray(lengths, dtype=np.int64))
    if found is not lengths:
        keep(found)
    return found
