"""Runs CUDA sources on the host, by a C++ compiler: those of the sm80 backward pass, and with
`emulated_quantizer` those that quantise.

The headers of `emulation/common` take the place of the wrappers of PTX, and have a function for
each instruction that stands between the lines of C++; all else is the kernels' own text, and the
family's own launches. Slow: for problems of a few tiles.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from backward_cases import HostBackward
from comparison import Array, poisoned
from gradient_comparison import GRADIENTS

import cuflash
from cuflash.arrays import describe
from cuflash.families.backward import sm80
from cuflash.operands import BackwardOperands
from cuflash.runtime import source
from cuflash.runtime.specialisation import Specialisation

HEADERS = Path(__file__).resolve().parent / "emulation"
_ENTRY = """
extern "C" __attribute__((visibility("default"))) void {name}_run(
    int blocks, int threads, const void* struct_, unsigned seed) {{
    const cuflash::Arguments& arguments = *static_cast<const cuflash::Arguments*>(struct_);
    emulated::seed = seed;
    emulated::grid.x = blocks;
    emulated::kernel = [&] {{ {name}(arguments); }};
    for (int i = 0; i < blocks; ++i) {{
        emulated::block.x = int((i64_(i) * 7919 + seed) % blocks);
        emulated::run_block(threads);
    }}
}}
"""

# The walk of a block through tiles, and its turns, from what they depend on.
_WALKS = """
extern "C" __attribute__((visibility("default"))) void key_tiles(
    int first_key, int q_len, int kv_len, int diagonal, int left, int right, int* found) {
    cuflash::KeyWork work;
    work.first_key = first_key, work.diagonal = diagonal;
    work.q_len = q_len, work.kv_len = kv_len;
    work.find_tiles(left, right);
    found[0] = work.begin, found[1] = work.end;
    found[2] = work.clean_begin, found[3] = work.clean_end;
}
extern "C" __attribute__((visibility("default"))) int turn(
    int rises, int keys, int queries, int kv_len, int diagonal, int left, int right) {
    return cuflash::turn_of(rises, keys, queries, kv_len, diagonal, left, right);
}
extern "C" __attribute__((visibility("default"))) void drawn(
    int ticket, int all_kv_heads, int key_blocks, int section, int* found) {
    cuflash::Arguments arguments;
    arguments.all_kv_heads = all_kv_heads, arguments.key_blocks = key_blocks;
    arguments.section = section;
    const cuflash::KeyOrder order(ticket, arguments);
    found[0] = order.head_of_all, found[1] = order.keys, found[2] = order.rises;
}
"""

needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def host_code(spec: Specialisation) -> ctypes.CDLL:
    """The kernels of a specialisation, compiled for the host."""
    return ctypes.CDLL(str(_build(spec)))


class EmulatedKernels:
    """Stands for a loaded module, and for what queues its kernels."""

    def __init__(self, spec: Specialisation) -> None:
        self.code = host_code(spec)

    def function(self, name: str) -> Any:
        return getattr(self.code, f"{name}_run")


def launcher(
    kernel: Any, blocks: int, threads: int, shared_memory: int, changing: Struct, struct: bytes,
    *, early: bool = False,
) -> Callable[..., None]:  # fmt: skip
    assert shared_memory <= 227 << 10

    def launch(*values: Any) -> None:
        given = changing.pack(*values) + struct[changing.size :]
        kernel(blocks, threads, given, blocks + threads)

    return launch


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuflash_emulated_")  # until the process ends


def _folder() -> Path:
    return Path(_temporary().name)


@functools.cache
def _sources() -> Path:
    """A folder with all sources, as C++ has to have them."""
    for name in source.hashes():
        path = _folder() / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_translated(source.read(name)))
    return _folder() / "sources"


_ASSEMBLER = re.compile(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)(.*?)\);', re.DOTALL)
_OPERAND = re.compile(r'"[=+]?\w"\(([^()]*)\)')
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w[\w ]*) (\w+)\[\];")
_SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?\w[\w ]* (\w+)(?:\[[^;]*\])?;")


def _translated(text: str) -> str:
    """Instructions are calls of functions with their names and operands. Shared memory whose size
    a launch says is where the emulation has it; the rest it is told of.
    """
    text = _ASSEMBLER.sub(_call, text)
    text = _DYNAMIC.sub(r"\1* const \2 = emulated::memory;", text)
    told = r"\g<0> static const bool \1_shared = emulated::is_shared(&\1, sizeof \1);"
    return _SHARED.sub(told, text)


def _call(statement: re.Match[str]) -> str:
    instruction = "".join(re.findall(r'"([^"]*)"', statement[1])).split(" ")[0]
    name = re.sub(r"\W+", "_", instruction)
    return f"emulated::{name}({', '.join(_OPERAND.findall(statement[2]))});" if name else ";"


@functools.cache
def _build(spec: Specialisation) -> Path:
    config = dict(spec.config)
    return compiled(spec, (spec.name, str(config["prepare"]), str(config["finish"])), _WALKS)


@functools.cache
def compiled(spec: Specialisation, names: tuple[str, ...], more: str = "") -> Path:
    """A library with the kernels of these names, each as `<name>_run`, and what `more` has."""
    lines = spec.text().splitlines()
    defines = "\n".join(line for line in lines if line.startswith("#define CONFIG_"))
    text = f'{defines}\n#include "common/ptx_ampere.cuh"\n#include "{spec.source}"\n'
    text += more + "typedef long long i64_;" + "".join(_ENTRY.format(name=name) for name in names)
    stem = _folder() / hashlib.sha256(text.encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(text)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HEADERS}"]
    command += ["-fvisibility=hidden", "-fno-gnu-unique"]  # what is loaded shares no names
    # No sum takes a product in unrounded, and a jump may lead to another stack.
    command += ["-ffp-contract=off", "-U_FORTIFY_SOURCE"]
    command += [f"-I{_sources()}", str(stem.with_suffix(".cpp")), "-o", f"{stem}.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return Path(f"{stem}.so")


def run_emulated(
    patch: pytest.MonkeyPatch, backward: HostBackward, device: str = "9.0", **options: Any
) -> tuple[Array, Array, Array]:
    """Gradients of a backward pass, in the memory that it has for them."""
    given = backward.call.options | options | backward.arrays | backward.gradients
    return emulated_backward(patch, device, **given)


def emulated_backward(
    patch: pytest.MonkeyPatch, device: str, **given: Any
) -> tuple[Array, Array, Array]:
    """`cuflash.attention_backward` by the kernels, which see arrays of the host as if they were the
    device's.
    """
    patch.setattr(sm80.module, "load", lambda spec, device: EmulatedKernels(spec))
    patch.setattr(sm80, "launcher", launcher)
    patch.setattr(sm80, "_allocate", _Memory)
    patch.setattr(sm80, "_section", lambda *_: 1)  # so that there are several
    patch.setattr(sm80, "lengths_on_device", lambda _, lens: _on_device(np.asarray(lens, np.int64)))
    arrays = {name: given.pop(name) for name in ("q", "k", "v", "dout", "out", "lse")}
    for name in GRADIENTS:
        like = arrays[name[1:]]
        made = given.pop(name, None)
        arrays[name] = poisoned(like.shape, like.dtype) if made is None else made
    given |= {n: np.asarray(given[n]) for n in ("q_lens", "kv_lens") if given.get(n) is not None}
    given |= {"kernel": "sm80", "backward": True, "device": device}
    infos = {name: _described(name, array) for name, array in arrays.items()}
    plan = cuflash.explain(**(given | infos))
    operands = {name: _on_device(array) for name, array in arrays.items()}
    lens = {name: given.get(name) for name in ("q_lens", "kv_lens")}
    sm80.prepare(plan)(cast("BackwardOperands", SimpleNamespace(**operands, **lens)))
    return arrays["dq"], arrays["dk"], arrays["dv"]


def _described(name: str, array: Array) -> Any:
    return dataclasses.replace(describe(name, array), device="cuda:0")


def _on_device(array: Array) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=array.ctypes.data), array=array)


class _Memory:
    """Workspace, full of NaN."""

    def __init__(self, size: int) -> None:
        self._memory = np.full(size + 128, 0xFF, np.uint8)
        self.ptr = -(-self._memory.ctypes.data // 128) * 128
