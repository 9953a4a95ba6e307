"""What the sm80 family hands to its kernel, without a GPU: the kernel here only takes notes."""

from __future__ import annotations

import math
from collections.abc import Callable
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArrayInfo, dispatch
from cuflash.families import sm80
from cuflash.operands import Operands
from cuflash.runtime.device import named

HOPPER = named("9.0")
POINTERS = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000}
OPTIONAL = {"lse": 0x5000, "q_lens": 0x6000, "kv_lens": 0x7000}


class Kernel:
    """Stands for a compiled kernel and its launcher."""

    def __init__(self) -> None:
        self.name = ""
        self.blocks = self.threads = self.shared_memory = 0
        self.arguments: Any = None

    def launcher(
        self, kernel: Kernel, blocks: int, threads: int, shared_memory: int,
        changing: Struct, struct: bytes,
    ) -> Callable[..., None]:  # fmt: skip
        assert kernel is self
        self.blocks, self.threads, self.shared_memory = blocks, threads, shared_memory

        def launch(*values: int) -> None:
            given = changing.pack(*values) + struct[changing.size :]
            self.arguments = np.frombuffer(given, sm80._ARGUMENTS)[0]

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    taken = Kernel()

    def load(module: Any, device: Any) -> Any:
        def function(name: str) -> Kernel:
            assert name == module.name
            taken.name = name
            return taken

        return SimpleNamespace(function=function)

    monkeypatch.setattr(sm80.module, "load", load)
    monkeypatch.setattr(sm80, "launcher", taken.launcher)
    monkeypatch.setattr(sm80, "lengths_on_device", lambda name, lens: lens)
    return taken


def launch(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, *, lse: bool = False, **options: Any) -> Any:
    """Plan a call on described arrays and run it on arrays that are only addresses."""
    plan = cuflash.explain(q, k, v, device=HOPPER, return_lse=lse, kernel="sm80", **options)
    given = {name for name in OPTIONAL if name in options} | ({"lse"} if lse else set())
    arrays: dict[str, Any] = {
        name: SimpleNamespace(data=SimpleNamespace(ptr=at))
        for name, at in {**POINTERS, **OPTIONAL}.items()
        if name in POINTERS or name in given
    }
    sm80.prepare(plan)(Operands(**arrays, starts=tuple(POINTERS.values())))
    return plan


def test_every_argument_reaches_the_kernel(kernel: Kernel) -> None:
    q = ArrayInfo((2, 6, 300, 64), "bfloat16")
    k = ArrayInfo((2, 3, 500, 64), "bfloat16", strides=(96000, 64, 192, 1))
    plan = launch(q, k, k, lse=True, causal=True)
    given = kernel.arguments
    assert {name: int(given[name]) for name in POINTERS} == POINTERS
    assert [int(given[name]) for name in OPTIONAL] == [OPTIONAL["lse"], 0, 0]
    steps = [[int(given[f"{n}_{axis}"]) for axis in ("entry", "head", "row")] for n in "qk"]
    assert steps == [[6 * 300 * 64, 300 * 64, 64], [96000, 64, 192]]
    names = ("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v", "row_blocks")
    assert [int(given[name]) for name in names] == [6, 2, 300, 500, 64, 64, 3]
    assert int(given["right"]) == 0
    assert int(given["left"]) > 800
    assert int(given["top_left"]) == int(given["prepare"]) == 0
    assert int(given["out_aligned"]) == 1
    assert float(given["factor"]) == pytest.approx(math.log2(math.e) / 8)
    assert (kernel.blocks, kernel.threads) == (2 * 6 * 3, 128)
    assert kernel.shared_memory == plan.tiling.launch.shared_memory == 48 * 1024
    assert kernel.name == plan.tiling.launch.module.name == "cuflash_fwd_sm80_d64_bf16_bounded"


@pytest.mark.parametrize("names", [(), ("q_lens",), ("kv_lens",), ("q_lens", "kv_lens")], ids=str)
def test_pointers_that_are_not_given_are_null(names: tuple[str, ...], kernel: Kernel) -> None:
    q, lens = ArrayInfo((2, 6, 300, 64)), ArrayInfo((2,), "int64")
    launch(q, q, q, **dict.fromkeys(names, lens))
    expected = [OPTIONAL[name] if name in names else 0 for name in OPTIONAL]
    assert [int(kernel.arguments[name]) for name in OPTIONAL] == expected


@pytest.mark.parametrize(
    ("options", "prepare", "premultiply", "factor"),
    [
        ({"scale": 0.5}, 0, 0.0, 0.5 * math.log2(math.e)),
        ({"scale": -0.5}, 1, -0.5 * math.log2(math.e), 1.0),
        ({"scale": 0.0}, 1, 0.0, 1.0),
        ({"scale": 0.5, "softcap": 4.0}, 1, 0.125, 4.0 * math.log2(math.e)),
        ({"scale": -0.5, "softcap": 4.0}, 1, -0.125, 4.0 * math.log2(math.e)),
        ({"scale": 1e-40}, 1, 0.0, 1.0),
        ({"scale": 0.5, "softcap": 1e-40}, 1, 3e38, 1.2e-38),
    ],
)
def test_scores_reach_log2_units(
    options: dict[str, float], prepare: int, premultiply: float, factor: float, kernel: Kernel
) -> None:
    info = ArrayInfo((1, 1, 40, 64))
    launch(info, info, info, **options)
    given = kernel.arguments
    assert int(given["prepare"]) == prepare
    assert float(given["premultiply"]) == pytest.approx(premultiply)
    assert float(given["factor"]) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("dims", "changes", "name"),
    [
        ((64, 64), {}, "d64_f16"),
        ((40, 40), {}, "d64_f16"),
        ((61, 61), {}, "d64_f16_unaligned"),
        ((192, 128), {}, "d192x128_f16"),
        ((128, 128), {"aligned": False}, "d128_f16_unaligned"),
        ((1, 1), {}, "d32_f16_unaligned"),
        ((256, 256), {}, "d256_f16"),
    ],
)
def test_variants(
    dims: tuple[int, int], changes: dict[str, Any], name: str, kernel: Kernel
) -> None:
    q, v = (ArrayInfo((1, 2, 50, dim), **changes) for dim in dims)
    launch(q, q, v)
    assert kernel.name == f"cuflash_fwd_sm80_{name}"


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_tiles_fit_the_device(capability: str, dim: int) -> None:
    device = named(capability)
    info = ArrayInfo((1, 4, 100, dim))
    for options in ({}, {"causal": True}, {"softcap": 2.0}):
        plan = dispatch.choose(cuflash.explain(info, info, info, device=device, **options).spec,
                               device, "sm80")  # fmt: skip
        launch = plan.tiling.launch
        assert launch is not None
        assert launch.shared_memory <= device.shared_memory_per_block
        tile = sm80._Variant.of(plan.spec).tile(device)
        registers = tile.registers(dim) + 45  # what is not scores or output, by the kernel's budget
        assert registers <= 255
        assert 32 * tile.warps * tile.blocks * registers <= 65536


def test_a_plan_shows_its_kernel() -> None:
    info = ArrayInfo((2, 4, 300, 128))
    shown = str(cuflash.explain(info, info, info, causal=True, device="9.0", kernel="sm80"))
    assert "  kernel     cuflash_fwd_sm80_d128_f16_bounded; " in shown
    assert "  grid       24 blocks of 128 threads, 72 KiB of shared memory each" in shown
