"""Where the CUDA sources lie: inside an installed wheel, or at the top of the repository."""

from __future__ import annotations

import functools
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def root() -> Path:
    """Folder of the CUDA sources.

    Raises
    ------
    FileNotFoundError
        Naming both places, when the installation is incomplete.
    """
    places = (_PACKAGE / "_cuda_src", _PACKAGE.parent / "cuda_src")
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"CUDA sources: neither {places[0]} nor {places[1]} exists; reinstall cuflash"
    )


@functools.cache
def read(name: str) -> str:
    """Text of one source, by its path below `root()` such as ``"standard/softmax.cu"``."""
    return (root() / name).read_text(encoding="utf-8")
