"""Processes that meet in the cache of compiled modules; run by the tests in fresh ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compiling import compiled_from, write_sources

from cuflash.runtime import cache, compiler
from cuflash.runtime.compiler import Compiled
from cuflash.runtime.specialisation import Specialisation

ARCH = "sm_80"
SPEC = Specialisation("k.cu", "cuflash_k")


def slow_compiler(log: Path, seconds: float) -> Callable[..., Compiled]:
    """A compiler that notes each call in a file and takes its time."""

    def compile_cubin(text: str, arch: str, name: str, *, show_progress: bool = True) -> Compiled:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return compiled_from(text, arch)

    return compile_cubin


def get_in(folder: Path, log: Path, seconds: float, start: float = 0.0) -> tuple[bytes, bool]:
    """The cubin that the cache gives to this process, and whether it was there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(folder))
        write_sources(folder.parent / "sources", patch, k_cu="int k;\n")
        patch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
        patch.setattr(compiler, "compile_cubin", slow_compiler(log, seconds))
        while time.time() < start:
            time.sleep(0.001)
        entry = cache.get(SPEC, ARCH)
        return entry.path.read_bytes(), entry.hit


def run_python(script: str) -> str:
    """What a fresh process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()
