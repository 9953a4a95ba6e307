"""The CUDA sources: where they lie, and one text of a source with its headers for the compiler."""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]*)"')
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|endif)\b")
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


@functools.cache
def root() -> Path:
    """Folder of the CUDA sources: inside an installed wheel, or at the top of the repository.

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


def read(name: str) -> str:
    """Text of one source, by its path below `root()` such as ``"standard/softmax.cu"``."""
    return (root() / name).read_text(encoding="utf-8")


def hashes() -> dict[str, str]:
    """SHA-256 of each source, by its path below `root()`."""
    return {
        path.relative_to(root()).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root().rglob("*"))
        if path.suffix in (".cu", ".cuh")
    }


def expand(name: str) -> str:
    """Text of one source with every ``#include "..."`` replaced by that header, each header once.

    Names are relative to the including file, else to `root()`; ``#include <...>`` is left to the
    compiler. ``#line`` directives make compiler messages point at the files as they are on disk.

    The whole text is what the compiler gets, without search paths, so a hash of it tells whether
    anything changed.

    Raises
    ------
    FileNotFoundError
        For a header that does not exist, saying who includes it and where it was looked for.
    ValueError
        For headers that include each other, and for an include under a condition: an expansion
        could not honour both the condition and "once".
    """
    return "".join(f"{line}\n" for line in _lines(name, (), set()))


def _lines(name: str, including: tuple[str, ...], seen: set[str]) -> Iterator[str]:
    seen.add(name)
    yield f'#line 1 "{name}"'
    depth = 0
    for number, line in enumerate(read(name).splitlines(), 1):
        if condition := _CONDITION.match(line):
            depth += -1 if condition[1] == "endif" else 1
        include = _INCLUDE.match(line)
        if include is None:
            # Headers come once anyway, and a compiler warns of the pragma in a main file.
            yield "" if _PRAGMA_ONCE.match(line) else line
            continue
        place = f"{name}:{number}"
        if depth:
            raise ValueError(
                f'{place}: #include "{include[1]}" under a condition; include it at the top level, '
                "and put the condition around what uses it"
            )
        header = _find(include[1], name, place)
        if header in (*including, name):
            circle = " -> ".join((*including, name, header))
            raise ValueError(f"{place}: headers include each other: {circle}")
        if header in seen:
            yield ""
            continue
        yield from _lines(header, (*including, name), seen)
        yield f'#line {number + 1} "{name}"'


def _find(target: str, includer: str, place: str) -> str:
    """Path of a header below `root()`."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(includer), target))
    candidates = dict.fromkeys((beside, posixpath.normpath(target)))
    for candidate in candidates:
        outside = candidate.startswith(("../", "/"))
        if not outside and (root() / candidate).is_file():
            return candidate
    looked = " nor ".join(candidates)
    raise FileNotFoundError(f'{place}: #include "{target}": no {looked} below {root()}')
