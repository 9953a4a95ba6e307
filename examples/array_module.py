"""Where the arrays of an example live: NumPy, or CuPy where it finds a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np


def choose_array_module(device: str) -> tuple[Any, str]:
    """Return NumPy or CuPy for ``--device`` auto, cpu or gpu, and the reason in words."""
    if device == "cpu":
        return np, "asked for"
    try:
        import cupy
    except ImportError as error:
        reason = f"CuPy can't be imported ({error})"
    else:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            reason = f"CuPy finds no GPU ({error})"
        else:
            if count > 0:
                return cupy, f"CuPy finds {count} GPU{'s' if count > 1 else ''}"
            reason = "CuPy finds no GPU"
    if device == "gpu":
        raise RuntimeError(f"--device gpu: {reason}")
    return np, reason
