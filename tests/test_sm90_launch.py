"""What the sm90 family hands to its kernel, without a GPU: the kernel here only takes notes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArrayInfo, dispatch
from cuflash.families import sm90
from cuflash.operands import Operands
from cuflash.runtime.device import named
from cuflash.runtime.tensormap import Layout

HOPPER = named("9.0")
ARRAYS = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000}
OPTIONAL = {"lse": 0x5000, "q_lens": 0x6000, "kv_lens": 0x7000}
COUNTER = 0x8000


class Kernel:
    """Stands for a compiled kernel, its launcher, the maker of tensor maps and the counters."""

    def __init__(self) -> None:
        self.name = ""
        self.blocks = self.threads = self.shared_memory = 0
        self.early = False
        self.arguments: Any = None
        self.maps: dict[str, Layout] = {}
        self.counters = 0

    def launcher(
        self, kernel: Kernel, blocks: int, threads: int, shared_memory: int,
        changing: Struct, struct: bytes, *, early: bool,
    ) -> Callable[..., None]:  # fmt: skip
        assert kernel is self
        self.early = early
        self.blocks, self.threads, self.shared_memory = blocks, threads, shared_memory

        def launch(*values: Any) -> None:
            given = changing.pack(*values) + struct[changing.size :]
            self.arguments = np.frombuffer(given, sm90.ARGUMENTS)[0]

        return launch

    def map_at(self, layout: Layout, address: int) -> bytes:
        (name,) = (name for name, at in ARRAYS.items() if at == address)
        self.maps[name] = layout
        return address.to_bytes(8, "little") * 16

    def counters_of(self, device_index: int) -> Any:
        assert device_index == HOPPER.index
        self.counters += 1
        return SimpleNamespace(address=lambda: COUNTER)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    taken = Kernel()

    def load(module: Any, device: Any) -> Any:
        def function(name: str) -> Kernel:
            assert name == module.name
            taken.name = name
            return taken

        return SimpleNamespace(function=function)

    monkeypatch.setattr(sm90.module, "load", load)
    monkeypatch.setattr(sm90, "launcher", taken.launcher)
    monkeypatch.setattr(sm90.tensormap, "at", taken.map_at)
    monkeypatch.setattr(sm90.tickets, "counters", taken.counters_of)
    monkeypatch.setattr(sm90, "lengths_on_device", lambda name, lens: lens)
    return taken


def launch(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, *, lse: bool = False, **options: Any) -> Any:
    """Plan a call on described arrays and run it on arrays that are only addresses."""
    plan = cuflash.explain(q, k, v, **{"device": HOPPER, "return_lse": lse} | options)
    assert plan.family == "sm90"
    given = {name for name in OPTIONAL if name in options} | ({"lse"} if lse else set())
    arrays: dict[str, Any] = {
        name: SimpleNamespace(data=SimpleNamespace(ptr=at))
        for name, at in {**ARRAYS, **OPTIONAL}.items()
        if name in ARRAYS or name in given
    }
    sm90.prepare(plan)(Operands(**arrays, starts=tuple(ARRAYS.values())))
    return plan


def reasons(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, **options: Any) -> list[str]:
    plan = cuflash.explain(q, k, v, device=HOPPER, **options)
    found = dispatch.reasons_against("sm90", plan.spec, HOPPER)
    assert (plan.family != "sm90") == bool(found)
    return found


def config(plan: Any) -> dict[str, Any]:
    return dict(plan.tiling.launch.module.config)


def test_every_argument_reaches_the_kernel(kernel: Kernel) -> None:
    q = ArrayInfo((2, 6, 300, 64), "bfloat16")
    k = ArrayInfo((2, 3, 5000, 64), "bfloat16", strides=(960000, 64, 192, 1))
    plan = launch(q, k, k, lse=True, causal=True)
    given = kernel.arguments
    for name, at in ARRAYS.items():
        assert given[name].tolist() == [at] * 16
    assert [int(given[name]) for name in OPTIONAL] == [OPTIONAL["lse"], 0, 0]
    assert int(given["counter"]) == COUNTER
    names = ("q_heads", "group", "q_len", "kv_len", "pack", "rows", "packs", "all_packs")
    assert [int(given[name]) for name in names] == [6, 2, 300, 5000, 2, 32, 3, 6]
    assert [int(given[name]) for name in ("row_tiles", "tickets")] == [4, 24]
    assert int(given["section"]) == 6, "32 MiB hold 16 kv heads: all of them"
    assert int(given["right"]) == 0
    assert int(given["left"]) > 6000
    assert int(given["top_left"]) == 0
    factor = math.log2(math.e) / 8
    assert float(given["factor"]) == pytest.approx(factor)
    assert float(given["premultiply"]) == 0
    assert float(given["unseen"]) == pytest.approx(-3.4e38)
    assert (kernel.blocks, kernel.threads) == (24, 512)
    assert kernel.shared_memory == plan.tiling.launch.shared_memory == 113 * 1024
    module = plan.tiling.launch.module
    assert kernel.name == module.name == "cuflash_fwd_sm90_d64_bf16_bounded_192x128_turns"
    assert module.source == "sm90/forward.cu"
    assert module.exact_arch
    assert config(plan) == {
        "bits": 16, "qk_element": "Bfloat16", "v_element": "Bfloat16", "out_element": "Bfloat16",
        "score": "float", "lagging": True, "first": False, "stages": 2,
        "head_dim": 64, "head_dim_v": 64, "keys": 128, "groups": 3,
        "cluster": 1, "resident": 1, "ping_pong": True, "out_in_place": False, "bounded": True,
        "dynamic": True, "left": False, "scores": 0, "lengths": False, "shared_memory": 113 * 1024,
    }  # fmt: skip


def test_arrays_are_moved_in_boxes(kernel: Kernel) -> None:
    """Rows of a warpgroup, of each of its heads; of keys, a block's share of a tile."""
    q = ArrayInfo((2, 300, 6, 248))
    k = ArrayInfo((2, 2000, 3, 248), strides=(1600000, 768, 256, 1))
    launch(q, k, k, layout="bshd")
    maps = kernel.maps
    assert [maps[name].sizes for name in "qk"] == [(248, 6, 300, 2), (248, 3, 2000, 2)]
    assert maps["q"].byte_strides == maps["out"].byte_strides == (496, 2976, 892800)
    assert maps["k"].byte_strides == (512, 1536, 3200000)
    boxes = {name: maps[name].box for name in ARRAYS}
    assert boxes == {
        "q": (64, 2, 32, 1), "k": (64, 1, 32, 1), "v": (64, 1, 32, 1), "out": (64, 2, 32, 1),
    }  # fmt: skip
    assert {layout.swizzle_bytes for layout in maps.values()} == {128}
    assert {layout.dtype for layout in maps.values()} == {"float16"}
    launch(ArrayInfo((2, 128, 6, 248)), k, k, layout="bshd")
    assert [maps[name].box[2] for name in "kv"] == [64, 64], "alone it loads whole tiles"


def test_a_head_dim_of_96_lies_in_narrow_panels(kernel: Kernel) -> None:
    info = ArrayInfo((2, 4, 300, 96), "bfloat16")
    launch(info, info, info)
    assert {layout.swizzle_bytes for layout in kernel.maps.values()} == {64}
    boxes = [kernel.maps[name].box for name in ARRAYS]
    assert boxes == [(32, 1, 64, 1), (32, 1, 112, 1), (32, 1, 112, 1), (32, 1, 64, 1)]


def test_the_boxes_of_values_have_their_own_columns(kernel: Kernel) -> None:
    q, v = ArrayInfo((1, 2, 300, 192)), ArrayInfo((1, 2, 300, 128))
    launch(q, q, v)
    assert [kernel.maps[name].sizes[0] for name in ARRAYS] == [192, 192, 128, 128]


@pytest.mark.parametrize("names", [(), ("q_lens",), ("kv_lens",), ("q_lens", "kv_lens")], ids=str)
def test_pointers_that_are_not_given_are_null(names: tuple[str, ...], kernel: Kernel) -> None:
    q, lens = ArrayInfo((2, 6, 300, 64)), ArrayInfo((2,), "int64")
    plan = launch(q, q, q, **dict.fromkeys(names, lens))
    expected = [OPTIONAL[name] if name in names else 0 for name in OPTIONAL]
    assert [int(kernel.arguments[name]) for name in OPTIONAL] == expected
    assert config(plan)["lengths"] == bool(names)
    assert ("_lengths_" in kernel.name) == bool(names)


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "drawn"),
    [
        (64, 300, {}, True),
        (64, 3000, {}, True),
        (128, 300, {}, False),
        (128, 300, {"window": (5, 5)}, True),
        (128, 300, {"kv_lens": [1, 300]}, True),
        (256, 300, {"q_lens": [1, 300]}, True),
        (256, 3000, {"q_lens": [1, 300]}, False),  # a pair of blocks
    ],
)
def test_work_is_drawn_where_it_takes_unequal_times(
    kernel: Kernel, head_dim: int, length: int, options: dict[str, Any], drawn: bool
) -> None:
    info = ArrayInfo((2, 6, length, head_dim))
    plan = launch(info, info, info, **options)
    assert plan.tiling.workspace == 4 * drawn
    assert (kernel.counters, int(kernel.arguments["counter"])) == (drawn, COUNTER * drawn)
    assert config(plan)["dynamic"] == drawn
    assert kernel.early == drawn
    assert ("work by tickets" in plan.tiling.note) == drawn


@pytest.mark.parametrize(
    ("options", "scores", "premultiply", "factor"),
    [
        ({"scale": 0.5}, 0, 0.0, 0.5 * math.log2(math.e)),
        ({"scale": -0.5}, 1, -0.5 * math.log2(math.e), 1.0),
        ({"scale": 0.0}, 1, 0.0, 1.0),
        ({"scale": 0.5, "softcap": 4.0}, 2, 0.125, 4.0 * math.log2(math.e)),
        ({"scale": -0.5, "softcap": 4.0}, 2, -0.125, 4.0 * math.log2(math.e)),
        ({"scale": 1000.0}, 0, 0.0, 1000.0 * math.log2(math.e)),
    ],
)
def test_scores_reach_log2_units(
    options: dict[str, float], scores: int, premultiply: float, factor: float, kernel: Kernel
) -> None:
    info = ArrayInfo((1, 1, 40, 64))
    plan = launch(info, info, info, **options)
    given = kernel.arguments
    assert config(plan)["scores"] == scores
    assert float(given["premultiply"]) == pytest.approx(premultiply)
    assert float(given["factor"]) == pytest.approx(factor)
    product = given["unseen"] * given["factor"]
    assert product < -1e38
    assert np.isfinite(product), "or the weight of a hidden score is NaN"
    assert float(given["unseen"]) == pytest.approx(-3.4e38 / max(1, factor))


@pytest.mark.parametrize(
    ("kv_len", "kv_heads", "section"),
    [
        (1 << 20, 8, 1),  # one kv head and its group at the least
        (65536, 8, 1),  # exactly 32 MiB
        (32768, 8, 2),
        (32769, 8, 1),
        (20000, 8, 2),  # 3 would fit, but a power of two it is
        (16384, 8, 4),
        (300, 8, 16),  # no more than there are
    ],
)
def test_sections_hold_packs_that_stay_in_the_cache(
    kv_len: int, kv_heads: int, section: int, kernel: Kernel
) -> None:
    q = ArrayInfo((2, 4 * kv_heads, 320, 128))
    k = ArrayInfo((2, kv_heads, kv_len, 128))
    launch(q, k, k, causal=True)
    assert int(kernel.arguments["pack"]) == 4
    assert int(kernel.arguments["section"]) == section
    single = ArrayInfo((2, kv_heads, 320, 128))
    launch(single, k, k, causal=True)
    assert (int(kernel.arguments["pack"]), int(kernel.arguments["section"])) == (1, section)


@pytest.mark.parametrize(
    ("heads", "q_len", "options", "pack", "tickets"),
    [
        ((8, 8), 1, {}, 1, 8),
        ((8, 2), 1, {}, 4, 2),  # a row of each head of a group
        ((8, 2), 32, {}, 4, 2),  # exactly a tile
        ((8, 2), 33, {}, 2, 4),  # where 4 heads together would need 2 tiles each
        ((8, 2), 8192, {}, 1, 512),  # as many either way
        ((8, 2), 8192, {"causal": True}, 4, 512),  # and fewer keys that are hidden
        ((6, 2), 1, {}, 3, 2),
        ((6, 2), 8192, {"causal": True}, 1, 384),  # 3 times 21 rows leave a line of 64 unused
        ((7, 1), 5, {"causal": True}, 7, 1),
        ((128, 1), 1, {}, 64, 2),  # as many as a warpgroup has lines
        ((40, 1), 5, {}, 20, 2),  # 3 rows of 20 heads; 40 would go row by row
    ],
)
def test_heads_that_share_keys_fill_tiles_together(
    heads: tuple[int, int], q_len: int, options: dict[str, Any], pack: int, tickets: int,
    kernel: Kernel,
) -> None:  # fmt: skip
    q, k = (ArrayInfo((1, n, length, 128)) for n, length in zip(heads, (q_len, 900), strict=True))
    plan = launch(q, k, k, **options)
    given = kernel.arguments
    names = ("pack", "rows", "packs", "all_packs", "tickets")
    expected = [pack, 64 // pack, heads[0] // pack, heads[0] // pack, tickets]
    assert [int(given[name]) for name in names] == expected
    assert (plan.tiling.heads, plan.tiling.q_rows) == (pack, 2 * (64 // pack))
    assert kernel.maps["q"].box == kernel.maps["out"].box == (64, pack, 64 // pack, 1)


@pytest.mark.parametrize(
    ("q_len", "sms", "blocks", "row_tiles"),
    [
        (8192, 132, 132, 32),
        (8192, 0, 132, 32),  # a device that is only named
        (8192, 133, 132, 32),  # a pair more would not fit
        (8192, 78, 78, 32),
        (300, 132, 2 * 2 * 4, 2),
        (257, 132, 2 * 2 * 4, 2),
        (256, 132, 2 * 4, 1),
        (129, 132, 2 * 4, 1),
        (128, 132, 4, 1),  # alone: the other of each pair would have no rows
        (1, 132, 4, 1),
    ],
)
def test_grids_of_pairs(q_len: int, sms: int, blocks: int, row_tiles: int, kernel: Kernel) -> None:
    info, k = ArrayInfo((2, 2, q_len, 256)), ArrayInfo((2, 2, 8192, 256))
    device = dataclasses.replace(HOPPER, sm_count=sms)
    plan = launch(info, k, k, device=device)
    cluster = config(plan)["cluster"]
    assert cluster == (2 if q_len > 128 else 1)
    assert ("_pair" in kernel.name) == (cluster == 2)
    assert kernel.blocks == plan.tiling.launch.blocks == blocks
    given = kernel.arguments
    assert (int(given["row_tiles"]), int(given["tickets"])) == (row_tiles, 4 * row_tiles)
    assert kernel.threads == 384


@pytest.mark.parametrize(
    ("dims", "kv_len", "options", "name"),
    [
        ((64, 64), 1024, {}, "d64_f16_128x64_twice"),
        ((64, 64), 1025, {}, "d64_f16_192x128_turns"),
        ((64, 64), 9000, {"softcap": 2.0}, "d64_f16_softcap_192x112_turns"),
        ((64, 64), 1024, {"causal": True}, "d64_f16_bounded_128x64_twice"),
        ((64, 64), 1025, {"causal": True}, "d64_f16_bounded_192x128_turns"),
        ((8, 8), 300, {"window": (5, None)}, "d64_f16_bounded_left_128x64_twice"),
        ((72, 72), 300, {}, "d96_f16_192x112_turns"),
        ((96, 96), 9000, {"causal": True, "softcap": 2.0}, "d96_f16_bounded_softcap_192x96_turns"),
        ((104, 104), 300, {}, "d128_f16_128x128"),
        ((128, 128), 1025, {}, "d128_f16_192x80_turns"),
        ((128, 128), 4096, {"causal": True}, "d128_f16_bounded_128x128_turns"),
        ((128, 128), 4097, {"causal": True}, "d128_f16_bounded_192x80_turns"),
        ((128, 128), 300, {"scale": -1.0}, "d128_f16_scaled_128x128"),
        ((192, 192), 300, {}, "d192_f16_128x96_turns"),
        ((192, 128), 300, {}, "d192x128_f16_128x128_turns"),
        ((176, 104), 300, {"causal": True}, "d192x128_f16_bounded_128x128_turns"),
        ((192, 64), 300, {}, "d192_f16_128x96_turns"),
        ((192, 96), 300, {}, "d192_f16_128x96_turns"),
        ((128, 192), 300, {}, "d192_f16_128x96_turns"),
        ((64, 128), 300, {}, "d128_f16_128x128"),
        ((64, 96), 300, {}, "d96_f16_192x112_turns"),
        ((256, 256), 300, {}, "d256_f16_128x64"),
        ((256, 256), 1025, {}, "d256_f16_128x64_turns_pair"),
        ((200, 200), 300, {"causal": True}, "d256_f16_bounded_128x64_turns"),
        ((256, 8), 1025, {}, "d256_f16_128x64_turns_pair"),
    ],
)
def test_tiles_by_shape(
    dims: tuple[int, int], kv_len: int, options: dict[str, Any], name: str, kernel: Kernel
) -> None:
    q = ArrayInfo((1, 2, 300, dims[0]))
    k, v = (ArrayInfo((1, 2, kv_len, dim)) for dim in dims)
    plan = launch(q, k, v, **options)
    assert kernel.name == f"cuflash_fwd_sm90_{name}"
    (size,) = (part for part in name.split("_") if re.fullmatch(r"\d{2,}x\d+", part))
    rows, keys = (int(n) for n in size.split("x"))
    assert (plan.tiling.q_rows, plan.tiling.keys) == (rows, keys)
    assert plan.tiling.launch.module in sm90.specialisations(HOPPER, dims, ["float16"])
    assert max(layout.box[2] for layout in kernel.maps.values()) <= 256


@pytest.mark.parametrize("way", [{}, {"causal": True}, {"softcap": 2.0}, {"scale": 0.0}])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (40, 248), (256, 256), (128, 8)])
@pytest.mark.parametrize("lengths", [(1, 100), (200, 100), (300, 5000)])
def test_what_calls_load_is_listed(
    dims: tuple[int, int], lengths: tuple[int, int], way: dict[str, Any]
) -> None:
    q = ArrayInfo((1, 2, lengths[0], dims[0]))
    k, v = (ArrayInfo((1, 2, lengths[1], dim)) for dim in dims)
    for more in ({}, {"kv_lens": [5]}):
        plan = cuflash.explain(q, k, v, device=HOPPER, kernel="sm90", **way, **more)
        assert plan.tiling.launch is not None
        assert plan.tiling.launch.module in sm90.specialisations(HOPPER, dims, ["float16"])


def test_other_devices_have_no_modules() -> None:
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert sm90.specialisations(named(capability), [64], ["float16"]) == []
    assert sm90.specialisations(HOPPER, [60, 61], ["float16"]) == []
    assert sm90.specialisations(HOPPER, [64], ["float32"]) == []


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_other_capabilities_are_refused(capability: str) -> None:
    info = ArrayInfo((1, 2, 300, 64))
    plan = cuflash.explain(info, info, info, device=capability)
    assert plan.family == "sm80"
    found = dispatch.reasons_against("sm90", plan.spec, plan.device)
    assert found == [f"needs compute capability 9.0, not {capability}"]


PLAIN = ArrayInfo((2, 4, 300, 64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": ArrayInfo((300, 300), "bool")}, "does not take mask"),
        ({"bias": ArrayInfo((300, 300))}, "does not take bias"),
        ({"q": ArrayInfo((2, 4, 300, 64), aligned=False)}, "q: needs to start at "),
        ({"k": ArrayInfo((2, 4, 300, 64), strides=(76804, 19200, 64, 1))}, "k: needs steps along "
         "batch of a positive multiple of 16 bytes below 2^40, not 153608"),
        ({"v": ArrayInfo((2, 4, 300, 64), strides=(76800, 0, 64, 1))},
         "v: needs steps along heads"),
        ({"q": ArrayInfo((2, 4, 300, 64), strides=(76800, 19200, -64, 1))}, "q: needs steps along "
         "seq of a positive multiple of 16 bytes below 2^40, not -128"),
        ({"v": ArrayInfo((2, 4, 300, 64), strides=(153600, 38400, 128, 2))},
         "v: needs neighbouring elements in its last axis"),
        ({"out": ArrayInfo((2, 4, 300, 64), strides=(80400, 20100, 67, 1))}, "out: needs steps "),
        ({"v": ArrayInfo((2, 4, 300, 60))}, "takes multiples of 8 as head_dim_v, not 60"),
        ({"q": ArrayInfo((2, 4, 300, 60)), "k": ArrayInfo((2, 4, 300, 60))},
         "takes multiples of 8 as head_dim, not 60"),
        ({"k": ArrayInfo((2, 4, 0, 64)), "v": ArrayInfo((2, 4, 0, 64))}, "needs keys"),
    ],
)  # fmt: skip
def test_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    assert reasons(PLAIN, PLAIN, PLAIN) == []
    found = reasons(**({"q": PLAIN, "k": PLAIN, "v": PLAIN} | changes))
    assert any(one.startswith(reason) for one in found), found


def test_each_reason_is_given() -> None:
    info = ArrayInfo((2, 4, 300, 61), aligned=False)
    found = reasons(info, info, info, mask=ArrayInfo((300, 300), "bool"), out=info)
    starts = (
        *("does not take mask", "takes multiples of 8 as head_dim,"),
        *("takes multiples of 8 as head_dim_v,", "q: needs to start", "q: needs steps along seq"),
        *("v: needs to start", "out: needs steps along seq"),
    )
    for start in starts:
        assert any(one.startswith(start) for one in found)


def test_lengths_and_work_that_it_can_not_count_are_refused() -> None:
    long, row = ArrayInfo((1, 1, 1 << 29, 8)), ArrayInfo((1, 1, 1, 8))
    assert reasons(row, row, row) == []
    for q, k in ((row, long), (long, row)):
        assert reasons(q, k, k) == ["takes lengths below 536870912"]
    for batch, heads, taken in ((1 << 20, 1 << 10, False), ((1 << 20) - 1, 1 << 10, True)):
        info = ArrayInfo((batch, heads, 1, 8), strides=(heads * 8, 8, 8, 1))
        plan = cuflash.explain(info, info, info, device=HOPPER)
        found = dispatch.reasons_against("sm90", plan.spec, HOPPER)
        assert found == ([] if taken else ["takes less than 1073741824 tiles of 64 rows"])


@pytest.mark.parametrize("shape", [(0, 4, 300, 64), (2, 0, 300, 64), (2, 4, 0, 64)])
def test_a_problem_without_output_is_taken(shape: tuple[int, ...]) -> None:
    q, k = ArrayInfo(shape), ArrayInfo((shape[0], shape[1], 0, 64))
    plan = cuflash.explain(q, k, k, device=HOPPER, causal=True, kernel="sm90")
    assert plan.tiling.launch is not None
    assert plan.tiling.launch.blocks == 0


def test_a_plan_shows_its_kernel() -> None:
    info = ArrayInfo((2, 4, 5000, 128))
    shown = str(cuflash.explain(info, info, info, causal=True, device="9.0"))
    assert "  kernel     cuflash_fwd_sm90_d128_f16_bounded_192x80_turns; " in shown
    assert "  grid       132 blocks of 512 threads, 177 KiB of shared memory each" in shown
    assert "192 query rows x 80 keys" in shown
    assert "; 3 warpgroups, work by tickets" in shown
    wide = ArrayInfo((2, 4, 5000, 256))
    assert "; 2 warpgroups, clusters of 2" in str(cuflash.explain(wide, wide, wide, device="9.0"))
