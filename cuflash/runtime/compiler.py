"""CUDA C++ to a cubin, by the NVRTC that CuPy loads. Needs neither a GPU nor a driver."""

from __future__ import annotations

import functools
import logging
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from . import progress, ptxas, source
from .ptxas import Resources

_log = logging.getLogger("cuflash")

OPTIONS = (
    "-std=c++17",
    "-ftz=true",  # as CuPy compiles
    "--device-as-default-execution-space",  # generic lambdas inside kernels need it
    "--ptxas-options=-v",  # the log that `Resources` is read from
    "-lineinfo",  # lets profilers show the source; changes no instruction
)
# NVRTC has a cache of its own from this version on, beside that of `cache`: what it answers from
# there was not compiled, and `cuflash cache clear` does not empty it.
_OWN_CACHE_SINCE = 12, 9
_SLOW_S = 1.0


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a module. `log` is all that they said."""

    def __init__(self, name: str, arch: str, log: str) -> None:
        super().__init__(name, arch, log)  # what pickle passes to __init__ again
        self.name, self.arch, self.log = name, arch, log

    def __str__(self) -> str:
        return (
            f"{self.name} does not compile for {self.arch} by NVRTC {version_text()}; sources "
            f"below {source.root()}\n{self.log}"
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, the compiler's log, each kernel's resources by name, and how long it took."""

    cubin: bytes
    log: str
    resources: dict[str, Resources]
    seconds: float


def _nvrtc() -> Any:
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler.

    Raises
    ------
    ImportError, RuntimeError
        Where CuPy or the NVRTC library is missing.
    """
    major, minor = _nvrtc().getVersion()
    return major, minor


def version_text() -> str:
    """As in ``"13.0"``."""
    return ".".join(map(str, nvrtc_version()))


@functools.cache
def supported_architectures() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC compiles for, as 10 times major plus minor."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def architecture(compute_capability: tuple[int, int], exact: bool) -> str:
    """The compiler's name of a target: ``sm_90a`` for that one alone, ``sm_90`` with successors.

    Examples
    --------
    >>> architecture((9, 0), exact=True), architecture((8, 6), exact=False)
    ('sm_90a', 'sm_86')
    """
    major, minor = compute_capability
    return f"sm_{major}{minor}{'a' if exact else ''}"


def loadable_architecture(compute_capability: tuple[int, int], exact: bool) -> str:
    """The best target that this NVRTC compiles for and that the device runs.

    A cubin runs on later minor versions of its major version, so a device newer than the compiler
    is still served by an older sibling, unless the module is for one architecture alone.

    Raises
    ------
    RuntimeError
        Where there is none, naming those that this NVRTC knows.
    """
    major, minor = compute_capability
    siblings = [
        arch % 10
        for arch in supported_architectures()
        if arch // 10 == major and (arch % 10 == minor or (arch % 10 < minor and not exact))
    ]
    if not siblings:
        known = ", ".join(f"sm_{arch}" for arch in supported_architectures())
        raise RuntimeError(
            f"NVRTC {version_text()} compiles for {known}, not for "
            f"{architecture(compute_capability, exact)}"
        )
    return architecture((major, max(siblings)), exact)


def compile_cubin(text: str, arch: str, name: str, *, show_progress: bool = True) -> Compiled:
    """Compile one module.

    Parameters
    ----------
    text : str
        CUDA C++ without ``#include "..."``; see `Specialisation.text`.
    arch : str
        Such as ``"sm_90a"``.
    name : str
        For messages.
    show_progress : bool
        Show a line on a terminal while it takes longer than a second.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    nvrtc = _nvrtc()
    watched = progress.shown(f"cuflash: compiling {name} for {arch} ...", _SLOW_S)
    begin = time.perf_counter()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        with watched if show_progress else nullcontext():
            nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, *_past_own_cache()))
        cubin: bytes = nvrtc.getCUBIN(program)
        log = _clean(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = _clean(nvrtc.getProgramLog(program))
        raise CompileError(name, arch, log or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - begin
    if seconds > _SLOW_S:
        _log.info("compiled %s for %s in %.1f s", name, arch, seconds)
    # CuPy takes the last byte off, as if it were the end of a C string; disassemblers need it.
    return Compiled(cubin + b"\0", log, ptxas.parse(log), seconds)


def _past_own_cache() -> tuple[str, ...]:
    return ("--no-cache",) if nvrtc_version() >= _OWN_CACHE_SINCE else ()


def _clean(log: str) -> str:
    """Without the times, which would make equal compilations look different, and the NUL."""
    return re.sub(r"ptxas info\s*: Compile time = .*\n", "", log.replace("\0", "")).strip()
