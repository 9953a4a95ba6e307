"""What the backward family of sm90 hands to its kernels, without a GPU: they only take notes."""

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
from cuflash.families.backward import sm90
from cuflash.operands import BackwardOperands
from cuflash.runtime import graphs
from cuflash.runtime.device import named
from cuflash.runtime.tensormap import Layout

cupy: Any = pytest.importorskip("cupy")
HOPPER = named("9.0")
ADDRESSES = {name: 0x1000 * i for i, name in enumerate(
    ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv", "q_lens", "kv_lens"), 1
)}  # fmt: skip
WORKSPACE = 0x100000


class Kernels:
    """Stand for the compiled kernels, their launcher, the maker of tensor maps, and memory."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, int, int, int, bool]] = []
        self.arguments: Any = None
        self.maps: dict[str, Layout] = {}
        self.allocated: list[tuple[int, ...]] = []
        self.capturing = False

    def launcher(
        self, kernel: str, blocks: int, threads: int, shared_memory: int, changing: Struct,
        struct: bytes, *, early: bool = False,
    ) -> Callable[..., None]:  # fmt: skip
        def launch(*values: Any) -> None:
            filled = bytearray(struct)
            changing.pack_into(filled, 0, *values)
            arguments = np.frombuffer(bytes(filled), sm90.ARGUMENTS)[0]
            assert self.arguments is None or self.arguments.tobytes() == arguments.tobytes()
            self.arguments = arguments
            self.queued.append((kernel, blocks, threads, shared_memory, early))

        return launch

    def map_at(self, layout: Layout, address: int) -> bytes:
        names = {ADDRESSES[name]: name for name in sm90._MAPS}
        self.maps[names[address]] = layout
        return address.to_bytes(8, "little") * 16

    def memory(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.allocated.append(shape)
        return SimpleNamespace(data=SimpleNamespace(ptr=WORKSPACE))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    loaded = SimpleNamespace(function=lambda name: name)
    monkeypatch.setattr(sm90.module, "load", lambda *_: loaded)
    monkeypatch.setattr(sm90, "launcher", found.launcher)
    monkeypatch.setattr(sm90.tensormap, "at", found.map_at)
    monkeypatch.setattr(sm90, "lengths_on_device", lambda name, given: given)
    monkeypatch.setattr(cupy, "ndarray", found.memory)
    stream = SimpleNamespace(ptr=1, is_capturing=lambda: found.capturing)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    return found


def launch(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, **options: Any) -> Any:
    """Plan a backward pass and queue it."""
    plan = cuflash.explain(q, k, v, device=HOPPER, kernel="sm90", backward=True, **options)
    given = {
        name: SimpleNamespace(data=SimpleNamespace(ptr=address))
        for name, address in ADDRESSES.items()
        if name not in ("q_lens", "kv_lens") or name in options
    }
    sm90.prepare(plan)(BackwardOperands(**given))  # type: ignore[arg-type]
    return plan


def reasons(**arrays: Any) -> list[str]:
    plan = cuflash.explain(**arrays, device=HOPPER, backward=True)
    return dispatch.reasons_against("sm90", plan.spec, HOPPER)


@pytest.mark.parametrize(("head_dim", "early"), [(64, True), (128, False), (256, False)])
def test_rows_are_prepared_early_where_it_is_faster(
    head_dim: int, early: bool, kernels: Kernels
) -> None:
    info = ArrayInfo((2, 6, 300, head_dim))
    launch(info, info, info)
    assert [kernel[-1] for kernel in kernels.queued] == [early, True, True]


def test_three_kernels_follow_each_other(kernels: Kernels) -> None:
    q, k = ArrayInfo((2, 6, 300, 128)), ArrayInfo((2, 2, 500, 128))
    plan = launch(q, k, k, causal=True)
    name = "cuflash_bwd_sm90_d128_f16_bounded_64x128"
    tiles, tickets = 2 * 6 * 5, 2 * 2 * 4 * 5  # each tile of keys in 5 parts
    assert kernels.queued == [
        ("cuflash_bwd_prepare", tiles, 256, 0, False),
        (name, tickets, 384, plan.tiling.launch.shared_memory, True),
        ("cuflash_bwd_finish", tiles, 256, 0, True),
    ]
    given = kernels.arguments
    for field, value in {
        "q_heads": 6, "kv_heads": 2, "group": 3, "q_len": 300, "kv_len": 500, "head_dim": 128,
        "head_dim_v": 128, "q_tiles": 5, "key_tiles": 4, "all_kv_heads": 4, "tickets": tickets,
        "whole": 0, "parts": 5, "all_rows": tiles * 64, "right": 0, "left": 1 << 29, "top_left": 0,
    }.items():  # fmt: skip
        assert int(given[field]) == value, field
    for field, array in {"out": "out", "dout_rows": "dout", "lse": "lse", "dq": "dq"}.items():
        assert int(given[field]) == ADDRESSES[array]
    assert [int(given[name]) for name in ("q_lens", "kv_lens")] == [0, 0]
    assert list(given["out_steps"]) == list(given["dq_steps"]) == [6 * 300 * 128, 300 * 128, 128]
    assert list(given["lse_steps"]) == [1800, 300, 1]


def test_parts_of_the_workspace_do_not_overlap(kernels: Kernels) -> None:
    info = ArrayInfo((2, 3, 1300, 64), "bfloat16")
    for deterministic in (False, True):
        kernels.arguments = None
        plan = launch(info, info, info, deterministic=deterministic)
        tiles = 2 * 3 * 11
        rows = tiles * 128
        starts = [int(kernels.arguments[name]) - WORKSPACE for name in sm90._PARTS]
        pieces, parts = tiles, int(kernels.arguments["parts"])
        assert parts > 1
        counters = 4 * (32 + 1 + 2 * pieces + (tiles if deterministic else 0))
        end = 8 * rows + 4 * rows * 64
        assert starts[:3] == [0, 8 * rows, end]
        assert starts[3] == end + -(-counters // 256) * 256
        partials = 4 * 128 * (64 + 64) * pieces * parts
        assert starts[3] + partials == plan.tiling.workspace == kernels.allocated[-1][0]
        assert plan.tiling.workspace % 256 == 0
        assert ("_ordered_" in plan.tiling.launch.module.name) == deterministic


def test_tiles_are_moved_in_boxes(kernels: Kernels) -> None:
    q, k, v = (ArrayInfo((2, 300, heads, dim)) for heads, dim in ((6, 192), (3, 192), (3, 120)))
    launch(q, k, v, layout="bshd")
    boxes = {name: layout.box for name, layout in kernels.maps.items()}
    assert boxes == dict.fromkeys(("q", "k", "v", "dout", "dk", "dv"), (32, 1, 64, 1))
    assert {layout.swizzle_bytes for layout in kernels.maps.values()} == {64}
    sizes = {name: layout.sizes for name, layout in kernels.maps.items()}
    assert sizes["q"] == (192, 6, 300, 2)
    assert sizes["dout"] == (120, 6, 300, 2)
    assert sizes["dv"] == sizes["v"] == (120, 3, 300, 2)
    info = ArrayInfo((2, 3, 300, 64))
    kernels.maps.clear()
    kernels.arguments = None
    launch(info, info, info)
    boxes = {name: layout.box[2] for name, layout in kernels.maps.items()}
    assert boxes == {"q": 128, "k": 128, "v": 128, "dout": 128, "dk": 64, "dv": 64}


@pytest.mark.parametrize(
    ("options", "premultiply", "factor", "scale"),
    [
        ({"scale": 0.5}, 0.0, 0.5 * math.log2(math.e), 0.5),
        ({"scale": -0.5}, 0.0, -0.5 * math.log2(math.e), -0.5),
        ({"scale": 0.0}, 0.0, 0.0, 0.0),
        ({"scale": -0.5, "softcap": 4.0}, -0.125, 4.0 * math.log2(math.e), -0.5),
    ],
)
def test_scores_reach_log2_units(
    options: dict[str, float], premultiply: float, factor: float, scale: float, kernels: Kernels
) -> None:
    info = ArrayInfo((1, 1, 40, 64))
    launch(info, info, info, **options)
    found = [float(kernels.arguments[name]) for name in ("premultiply", "factor", "scale")]
    assert found == pytest.approx([premultiply, factor, scale])


def test_a_capture_keeps_its_workspace(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(graphs, "_kept", kept)
    info = ArrayInfo((1, 1, 40, 64))
    plan = cuflash.explain(info, info, info, device=HOPPER, kernel="sm90", backward=True)
    run = sm90.prepare(plan)
    given = {
        name: SimpleNamespace(data=SimpleNamespace(ptr=address))
        for name, address in ADDRESSES.items()
        if not name.endswith("_lens")
    }
    run(BackwardOperands(**given))  # type: ignore[arg-type]
    assert kept == []
    kernels.capturing = True
    run(BackwardOperands(**given))  # type: ignore[arg-type]
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("q_len", "group", "section"),
    [(1 << 20, 1, 1), (32768, 1, 1), (8192, 1, 2), (2048, 1, 8), (2048, 4, 2), (100, 1, 16)],
)
def test_sections_hold_heads_that_stay_in_the_cache(
    q_len: int, group: int, section: int, kernels: Kernels
) -> None:
    """Of 128 columns, 1,024 bytes a row."""
    q, k = ArrayInfo((2, 8 * group, q_len, 128)), ArrayInfo((2, 8, 300, 128))
    launch(q, k, k)
    assert int(kernels.arguments["section"]) == section
    assert int(kernels.arguments["sections"]) == 1, "few tiles of keys"


@pytest.mark.parametrize(("kv_len", "sections"), [(384, 1), (385, 9), (5000, 9)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sections_begin_as_0_one_after_the_other(
    kv_len: int, sections: int, deterministic: bool, kernels: Kernels
) -> None:
    """Each has a counter, before those of turns."""
    q, k = ArrayInfo((6, 6, 4000, 128)), ArrayInfo((6, 6, kv_len, 128))
    plan = launch(q, k, k, deterministic=deterministic)
    assert int(kernels.arguments["section"]) == 4
    assert int(kernels.arguments["sections"]) == sections
    counters, partials = (
        int(kernels.arguments[name]) - WORKSPACE for name in ("counters", "partials")
    )
    turns = 6 * 6 * 63 if deterministic else 0
    split = int(6 * 6 * -(-kv_len // 128) - kernels.arguments["whole"])
    size = 4 * (32 + sections + 2 * split + turns)
    assert partials == counters + -(-size // 256) * 256
    parts = int(kernels.arguments["parts"])
    assert plan.tiling.workspace == partials + 4 * 128 * 256 * split * parts


@pytest.mark.parametrize(
    ("heads", "lengths", "way", "split", "parts"),
    [
        ((32, 32), (16384, 16384), {}, 4, 16),  # 4,096 tiles of keys on 132 multiprocessors
        ((16, 16), (1024, 1024), {}, 128, 1),  # as many as there are, nearly
        ((2, 2), (2048, 2048), {}, 32, 4),
        ((2, 2), (2048, 2048), {"causal": True}, 32, 4),  # all are begun at once
        ((32, 32), (2048, 2048), {"causal": True}, 0, 1),  # the last are short
        ((32, 8), (4096, 4096), {}, 0, 1),  # 124, of which the last section has 32
        ((2, 1), (100, 40000), {}, 49, 1),  # one tile of queries
        ((1, 1), (40000, 100), {}, 1, 16),
        ((1, 1), (16000, 16000), {"window": (5000, 0)}, 125, 1),  # nearly as many as there are
        ((1, 1), (5000, 5000), {"window": (3000, 0)}, 40, 3),
        ((1, 1), (5000, 5000), {"window": (100, 0)}, 40, 1),  # of few tiles each
    ],
)
def test_pieces_that_leave_blocks_idle_are_split(
    heads: tuple[int, int], lengths: tuple[int, int], way: dict[str, Any], split: int, parts: int,
    kernels: Kernels,
) -> None:  # fmt: skip
    dim = 128 if heads == (32, 8) else 64
    q, k = (ArrayInfo((1, h, n, dim)) for h, n in zip(heads, lengths, strict=True))
    plan = launch(q, k, k, **way)
    pieces = heads[1] * -(-lengths[1] // 128)
    if parts == 1:
        split = 0
    assert int(kernels.arguments["whole"]) == pieces - split
    assert int(kernels.arguments["parts"]) == parts
    tickets = pieces - split + split * parts
    assert int(kernels.arguments["tickets"]) == tickets
    assert kernels.queued[1][1] == min(132, tickets)
    assert (f"; {split} of {pieces} tiles of keys in {parts} parts" in plan.tiling.note) == (
        parts > 1
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", [{}, {"causal": True}, {"window": (9, 9)}])
@pytest.mark.parametrize(
    ("kv_len", "section"), [(64, 32), (1024, 32), (4096, 16), (16384, 8), (1 << 21, 1)]
)
def test_sections_of_unequal_work_in_turn_hold_more_heads(
    kv_len: int, section: int, way: dict[str, Any], deterministic: bool, kernels: Kernels
) -> None:
    q, k = ArrayInfo((2, 16, 16384, 128)), ArrayInfo((2, 16, kv_len, 128))
    launch(q, k, k, **way, deterministic=deterministic)
    if way and deterministic:
        assert int(kernels.arguments["section"]) == section
        blocks = min(132, 32 * -(-kv_len // 128))
        assert int(kernels.arguments["sweep"]) == round(blocks / section)
    elif kv_len == 16384:
        assert int(kernels.arguments["section"]) == 1


@pytest.mark.parametrize("way", [{}, {"causal": True}, {"softcap": 2.0}, {"deterministic": True}])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (40, 248), (256, 256), (128, 8)])
def test_what_calls_load_is_listed(dims: tuple[int, int], way: dict[str, Any]) -> None:
    q, v = ArrayInfo((1, 2, 300, dims[0])), ArrayInfo((1, 2, 300, dims[1]))
    for more in ({}, {"kv_lens": [5]}):
        plan = cuflash.explain(q, q, v, device=HOPPER, kernel="sm90", backward=True, **way, **more)
        assert plan.tiling.launch is not None
        assert plan.tiling.launch.module in sm90.specialisations(HOPPER, dims, ["float16"])


def test_other_devices_have_no_modules() -> None:
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert sm90.specialisations(named(capability), [64], ["float16"]) == []
    assert sm90.specialisations(HOPPER, [60, 61], ["float16"]) == []
    assert sm90.specialisations(HOPPER, [64], ["float32"]) == []


PLAIN = ArrayInfo((2, 4, 300, 64))
BROADCAST = ArrayInfo((2, 4, 300, 64), strides=(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": ArrayInfo((300, 300), "bool")}, "does not take mask"),
        ({"bias": ArrayInfo((300, 300))}, "does not take bias"),
        ({"dout": BROADCAST}, "dout: needs neighbouring elements in its last axis"),
        ({"dout": ArrayInfo((2, 4, 300, 64), strides=(76800, 19200, 0, 1))},
         "dout: needs steps along seq of a positive multiple of 16 bytes below 2^40, not 0"),
        ({"out": ArrayInfo((2, 4, 300, 64), aligned=False)}, "out: needs to start at "),
        ({"dq": ArrayInfo((2, 4, 300, 64), strides=(80400, 20100, 67, 1))}, "dq: needs steps "),
        ({"dk": ArrayInfo((2, 4, 300, 64), strides=(153600, 38400, 128, 2))},
         "dk: needs neighbouring elements"),
        ({"dv": ArrayInfo((2, 4, 300, 64), aligned=False)}, "dv: needs to start at "),
        ({"v": ArrayInfo((2, 4, 300, 60))}, "takes multiples of 8 as head_dim_v, not 60"),
        ({"k": ArrayInfo((2, 4, 0, 64)), "v": ArrayInfo((2, 4, 0, 64))}, "needs keys"),
    ],
)  # fmt: skip
def test_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    assert reasons(q=PLAIN, k=PLAIN, v=PLAIN) == []
    found = reasons(**({"q": PLAIN, "k": PLAIN, "v": PLAIN} | changes))
    assert any(one.startswith(reason) for one in found), found


def test_a_plan_shows_its_kernel_and_workspace() -> None:
    info = ArrayInfo((2, 4, 5000, 128))
    shown = str(cuflash.explain(info, info, info, causal=True, device="9.0", backward=True))
    assert "  kernel     cuflash_bwd_sm90_d128_f16_bounded_64x128; " in shown
    assert "  grid       132 blocks of 384 threads, 194 KiB of shared memory each" in shown
    assert "64 query rows x 128 keys" in shown
    assert "  workspace  21 MB" in shown
    other = str(cuflash.explain(info, info, info, device="8.0", backward=True))
    assert "not sm90     needs compute capability 9.0, not 8.0" in other
