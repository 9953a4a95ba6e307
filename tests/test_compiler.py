"""NVRTC without a GPU: cubins, messages that name file and line, and what ptxas says of kernels."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import (
    ADD,
    ADD_HEADER,
    add_kernel,
    disassemble,
    needs_compiler,
    write_sources,
)

from cuflash.runtime import compiler, progress, ptxas
from cuflash.runtime.compiler import CompileError
from cuflash.runtime.ptxas import Resources

# As NVRTC 13.0 wrote them.
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the function 'fwd'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas info    : Compiling entry function 'store' for 'sm_75'
ptxas info    : Function properties for store
ptxas         .     640 bytes stack frame, 672 bytes spill stores, 832 bytes spill loads
ptxas info    : Used 64 registers, used 2 barriers, 640 bytes cumulative stack size
ptxas info    : Compiling entry function 'fwd' for 'sm_75'
ptxas info    : Function properties for fwd
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]
"""
INNER = """\
ptxas info    : Function properties for _Z4slowfi
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
"""


def test_resources_of_each_kernel_are_read() -> None:
    performance, ignored = (line for line in LOG.splitlines() if "(C75" in line)
    assert ptxas.parse(LOG) == {
        "store": Resources(64, 672, 832, 640, 0, 2, (ignored,)),
        "fwd": Resources(42, 0, 0, 0, 128, 1, (performance, ignored)),
    }
    assert ptxas.parse("") == {}


def test_spills_of_functions_that_kernels_call_count_for_each() -> None:
    found = ptxas.parse(LOG + INNER)
    assert (found["fwd"].spill_stores, found["fwd"].spill_loads) == (4, 12)
    assert (found["store"].spill_stores, found["store"].spill_loads) == (676, 844)
    assert found["fwd"].stack == 0


@needs_compiler
def test_resources_agree_with_what_the_compiler_says_today() -> None:
    text = """
    extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1; }
    extern "C" __global__ void shares(float* x) {
        __shared__ float shared[64];
        shared[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = shared[63 - threadIdx.x];
    }
    extern "C" __global__ void __launch_bounds__(1024) spills(float* x) {
        float a[150], sum = 0;
        #pragma unroll
        for (int i = 0; i < 150; ++i) a[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 150; ++i) sum += a[i] * a[(7 * i + 3) % 150];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 150; ++i) x[i * 1024 + threadIdx.x] = sum * a[i];
    }
    """
    found = compiler.compile_cubin(text, "sm_90", "three").resources
    assert set(found) == {"plain", "shares", "spills"}
    assert 0 < found["plain"].registers < 32
    assert (found["plain"].barriers, found["plain"].static_shared) == (0, 0)
    assert (found["shares"].barriers, found["shares"].static_shared) == (1, 256)
    for name in ("plain", "shares"):
        assert (found[name].spill_stores, found[name].spill_loads, found[name].stack) == (0, 0, 0)
    assert found["spills"].registers == 64
    assert min(found["spills"].spill_stores, found["spills"].spill_loads, found["spills"].stack) > 0


# --- compiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "exact", "name"),
    [((9, 0), True, "sm_90a"), ((9, 0), False, "sm_90"), ((12, 1), False, "sm_121")],
)
def test_architecture_names(capability: tuple[int, int], exact: bool, name: str) -> None:
    assert compiler.architecture(capability, exact) == name


def test_a_device_newer_than_the_compiler_gets_an_older_sibling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (80, 86, 90, 100))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 8))
    assert compiler.loadable_architecture((8, 7), False) == "sm_86"
    assert compiler.loadable_architecture((8, 6), False) == "sm_86"
    assert compiler.loadable_architecture((8, 0), False) == "sm_80"
    assert compiler.loadable_architecture((9, 0), True) == "sm_90a"
    for capability, exact in (((7, 5), False), ((12, 0), False), ((10, 3), True)):
        name = compiler.architecture(capability, exact)
        with pytest.raises(RuntimeError, match=f"NVRTC 12.8 compiles for .*, not for {name}$"):
            compiler.loadable_architecture(capability, exact)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_a_cubin_is_whole_and_for_its_architecture(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path, monkeypatch, add_cu=ADD, add_cuh=ADD_HEADER)
    compiled = compiler.compile_cubin(add_kernel().text(), arch, "cuflash_add")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert list(compiled.resources) == ["cuflash_add"]
    assert f"'cuflash_add' for '{arch}'" in compiled.log
    assert "Compile time" not in compiled.log
    assert compiled.seconds > 0
    assembly = disassemble(compiled.cubin)
    assert "FADD" in assembly
    assert re.search(rf"\.target\s+{arch}\b", assembly)


@needs_compiler
def test_an_architecture_with_its_own_instructions_needs_the_exact_target() -> None:
    text = """extern "C" __global__ void __launch_bounds__(128, 1) f() {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    }"""
    assert compiler.compile_cubin(text, "sm_90a", "f").cubin
    with pytest.raises(CompileError, match=r"f does not compile for sm_90 .*\n(.|\n)*setmaxnreg"):
        compiler.compile_cubin(text, "sm_90", "f")


@needs_compiler
@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ({"add_cu": ADD.replace("CONFIG_STEP", "CONFIG_STEPS")}, "add.cu(3): error: "),
        ({"add_cuh": ADD_HEADER.replace("a + b", "a + c")}, "add.cuh(3): error: "),
    ],
    ids=["source", "header"],
)
def test_an_error_names_the_file_and_line_on_disk(
    broken: dict[str, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path, monkeypatch, **{"add_cu": ADD, "add_cuh": ADD_HEADER, **broken})
    with pytest.raises(CompileError) as caught:
        compiler.compile_cubin(add_kernel().text(), "sm_80", "cuflash_add")
    error = caught.value
    assert place in error.log
    assert place in str(error)
    assert (error.name, error.arch) == ("cuflash_add", "sm_80")
    assert f"below {tmp_path}" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@needs_compiler
def test_the_compiler_keeps_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its source and result until it is given back."""
    nvrtc = compiler._nvrtc()
    alive: set[int] = set()
    create, destroy = nvrtc.createProgram, nvrtc.destroyProgram

    def note_create(*args: Any) -> Any:
        program = create(*args)
        alive.add(program)
        return program

    def note_destroy(program: Any) -> None:
        alive.remove(program)
        destroy(program)

    monkeypatch.setattr(nvrtc, "createProgram", note_create)
    monkeypatch.setattr(nvrtc, "destroyProgram", note_destroy)
    compiler.compile_cubin('extern "C" __global__ void f() {}', "sm_80", "f")
    with pytest.raises(CompileError):
        compiler.compile_cubin("no", "sm_80", "f")
    assert not alive


@needs_compiler
@pytest.mark.parametrize(("version", "past"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_what_is_compiled_is_not_from_a_cache_of_the_compiler(
    version: tuple[int, int], past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before do not know the option, and have no such cache."""
    nvrtc, given = compiler._nvrtc(), []
    compile_program = nvrtc.compileProgram

    def note(program: Any, options: tuple[str, ...]) -> None:
        given.extend(options)
        compile_program(program, tuple(option for option in options if option != "--no-cache"))

    monkeypatch.setattr(nvrtc, "compileProgram", note)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: version)
    compiler.compile_cubin('extern "C" __global__ void f() {}', "sm_80", "f")
    assert ("--no-cache" in given) == past


@needs_compiler
def test_an_unknown_architecture_is_told() -> None:
    with pytest.raises(CompileError, match=r"f does not compile for sm_999 .*\n.*-arch"):
        compiler.compile_cubin("", "sm_999", "f")


# --- long compilations ---------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@needs_compiler
@pytest.mark.parametrize("slow", [True, False])
def test_a_long_compilation_says_so(
    slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_SLOW_S", 0.0 if slow else 60.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "cuflash"):
        compiler.compile_cubin('extern "C" __global__ void f() {}', "sm_80", "cuflash_f")
    messages = [record.getMessage() for record in caplog.records]
    if slow:
        assert re.fullmatch(r"compiled cuflash_f for sm_80 in \d+\.\d s", messages[0])
        assert terminal.getvalue().startswith("\r\x1b[Kcuflash: compiling cuflash_f for sm_80")
    else:
        assert (messages, terminal.getvalue()) == ([], "")


def test_progress_ends_with_a_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    waited = []

    def work() -> None:
        while "busy" not in terminal.getvalue():
            waited.append(1)

    with progress.shown("busy", 0.01):
        work()
    assert waited
    assert terminal.getvalue() == "\r\x1b[Kbusy\r\x1b[K"


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    for standard_error in (stream, None):
        monkeypatch.setattr(sys, "stderr", standard_error)
        with progress.shown("busy", 0.0):
            pass
    assert stream.getvalue() == ""
