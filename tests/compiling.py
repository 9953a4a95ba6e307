"""What the tests of the compile path share: whether NVRTC is here, and sources to compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import sass
from cuflash.runtime import compiler, source
from cuflash.runtime.compiler import Compiled
from cuflash.runtime.ptxas import Resources
from cuflash.runtime.specialisation import Specialisation


def missing_compiler() -> str:
    """Why nothing can be compiled here; empty where it can."""
    try:
        compiler.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"CuPy or NVRTC can't be imported: {error}"
    return ""


needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())

ADD = """\
#include "add.cuh"
extern "C" __global__ void CONFIG_NAME(float* x) {
    x[threadIdx.x] = add(x[threadIdx.x], CONFIG_STEP);
}
"""
ADD_HEADER = """\
#pragma once
__device__ float add(float a, float b) {
    return a + b;
}
"""


def write_sources(folder: Path, patch: pytest.MonkeyPatch, **files: str) -> None:
    """Make `folder` the root of sources: ``a__b_cu=text`` writes a/b.cu."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/")[::-1].replace("_", ".", 1)[::-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    patch.setattr(source, "root", lambda: folder)


def add_kernel(step: int = 1) -> Specialisation:
    """The kernel of `ADD`."""
    return Specialisation("add.cu", "cuflash_add", (("step", step),))


class FakeCompiler:
    """Takes NVRTC's place: notes what it is asked for, and answers at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.version = (13, 0)
        patch.setattr(compiler, "nvrtc_version", lambda: self.version)
        patch.setattr(compiler, "compile_cubin", self.compile)

    def compile(self, text: str, arch: str, name: str, *, show_progress: bool = True) -> Compiled:
        self.calls.append((text, arch, name))
        return compiled_from(text, arch)


def compiled_from(text: str, arch: str) -> Compiled:
    resources = {"cuflash_add": Resources(registers=8, warnings=("careful",))}
    return Compiled(f"cubin of {arch}: {text}".encode(), "a log", resources, 0.5)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin; skips the test where there is no nvdisasm."""
    if sass.disassembler() is None:
        pytest.skip("no nvdisasm")
    return sass.disassemble(cubin)
