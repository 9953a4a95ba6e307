"""What the sm80 backward pass hands to its kernels, without a GPU: the kernels only take notes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArrayInfo
from cuflash.families.backward import sm80, sm80_tiles
from cuflash.families.backward.sm80_tiles import Tile
from cuflash.runtime.device import named

HOPPER = named("9.0")
NAMES = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
POINTERS = {name: 0x1000 * (at + 1) for at, name in enumerate(NAMES)}
LENS = {"q_lens": 0xE000, "kv_lens": 0xF000}
WORKSPACE = 0x100000


class Launches:
    """Stands for loaded kernels and what queues them."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, int, int, Any]] = []
        self.allocated: list[int] = []

    def launcher(
        self, name: str, blocks: int, threads: int, shared_memory: int,
        changing: Struct, struct: bytes,
    ) -> Callable[..., None]:  # fmt: skip
        def launch(*values: int) -> None:
            given = changing.pack(*values) + struct[changing.size :]
            arguments = np.frombuffer(given, sm80._ARGUMENTS)[0]
            self.made.append((name, blocks, threads, shared_memory, arguments))

        return launch

    def allocate(self, size: int) -> Any:
        self.allocated.append(size)
        return SimpleNamespace(ptr=WORKSPACE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(
        sm80.module, "load", lambda module, device: SimpleNamespace(function=lambda name: name)
    )
    monkeypatch.setattr(sm80, "launcher", made.launcher)
    monkeypatch.setattr(sm80, "_allocate", made.allocate)
    monkeypatch.setattr(sm80, "lengths_on_device", lambda name, lens: lens)
    return made


def launch(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, **options: Any) -> Any:
    """Plan a call on described arrays and run it on arrays that are only addresses."""
    plan = cuflash.explain(q, k, v, device=HOPPER, kernel="sm80", backward=True, **options)
    addresses = POINTERS | {name: at for name, at in LENS.items() if name in options}
    arrays: dict[str, Any] = {
        name: SimpleNamespace(data=SimpleNamespace(ptr=at)) for name, at in addresses.items()
    }
    sm80.prepare(plan)(SimpleNamespace(**({"q_lens": None, "kv_lens": None} | arrays)))  # type: ignore[arg-type]
    return plan


def test_every_argument_reaches_each_kernel(launches: Launches) -> None:
    q = ArrayInfo((2, 6, 300, 64), "bfloat16")
    k = ArrayInfo((2, 3, 500, 64), "bfloat16", strides=(96000, 64, 192, 1))
    lens = ArrayInfo((2,), "int64")
    lse = ArrayInfo((2, 6, 300), "float32", strides=(6000, 1000, 3))
    plan = launch(q, k, k, causal=True, kv_lens=lens, lse=lse, dk=k)
    name = "cuflash_bwd_sm80_d64_bf16_bounded"
    rows, keys = 2 * 6 * 3, 2 * 3 * 8
    memory = plan.tiling.launch.shared_memory
    assert [made[:4] for made in launches.made] == [
        (f"{name}_prepare", rows, 256, 0),
        (name, keys, 128, memory),
        (f"{name}_finish", rows, 128, 0),
    ]
    padded_rows = 2 * 6 * 384
    assert launches.allocated == [plan.tiling.workspace] == [padded_rows * (8 + 64 * 4)]
    for *_, given in launches.made:
        assert {name: int(given[name]) for name in POINTERS} == POINTERS
        assert [int(given[name]) for name in ("rows", "sums", "q_lens", "kv_lens")] == [
            WORKSPACE, WORKSPACE + 8 * padded_rows, 0, LENS["kv_lens"],
        ]  # fmt: skip
        steps = {
            name: [int(given[f"{name}_{axis}"]) for axis in ("entry", "head", "row")]
            for name in ("q", "k", "dk", "dv", "lse")
        }
        assert steps["q"] == [6 * 300 * 64, 300 * 64, 64]
        assert steps["k"] == steps["dk"] == [96000, 64, 192]
        assert steps["dv"] == [3 * 500 * 64, 500 * 64, 64]
        assert steps["lse"] == [6000, 1000, 3]
        counts = ("q_heads", "group", "q_len", "kv_len", "head_dim", "head_dim_v")
        assert [int(given[name]) for name in counts] == [6, 2, 300, 500, 64, 64]
        assert [int(given[name]) for name in ("row_blocks", "key_blocks")] == [3, 8]
        assert int(given["right"]) == 0
        assert int(given["left"]) > 800
        assert float(given["factor"]) == pytest.approx(math.log2(math.e) / 8)
        assert float(given["scale"]) == 1 / 8
        aligned = [int(given[f"{name}_aligned"]) for name in ("out", "dq", "dk", "dv")]
        assert aligned == [1, 1, 1, 1]


def test_deterministic_has_counters_behind_its_sums(launches: Launches) -> None:
    q = ArrayInfo((2, 6, 200, 128))
    k = ArrayInfo((2, 3, 300, 128))
    plan = launch(q, k, k, deterministic=True)
    tiles = 2 * 6 * 4
    rows = tiles * 64
    assert plan.tiling.workspace == rows * (8 + 128 * 4) + 4 * (32 + tiles * 4)
    assert "dQ added up in float32 in turn" in str(plan)
    name = "cuflash_bwd_sm80_d128_f16_deterministic"
    assert [made[:2] for made in launches.made] == [
        (f"{name}_prepare", tiles), (name, 2 * 3 * 5), (f"{name}_finish", tiles),
    ]  # fmt: skip
    for *_, given in launches.made:
        assert int(given["counters"]) == WORKSPACE + rows * (8 + 128 * 4)
        assert [int(given[name]) for name in ("all_kv_heads", "section")] == [6, 6]


@pytest.mark.parametrize(
    ("heads", "length", "section"),
    [(16, 16384, 2), (64, 4096, 8), (256, 1024, 32), (1, 65536, 1), (9, 16384, 3), (7, 64, 7)],
)
def test_sections_have_two_blocks_for_each_at_work(heads: int, length: int, section: int) -> None:
    q = ArrayInfo((1, heads, length, 128))
    plan = cuflash.explain(q, q, q, device=HOPPER, kernel="sm80", backward=True, deterministic=True)
    tile = sm80._Variant.of(plan.spec).tile(HOPPER)
    assert sm80._section(plan.spec, tile, HOPPER) == section


def test_without_keys_the_main_kernel_is_left_out(launches: Launches) -> None:
    launch(ArrayInfo((1, 2, 20, 64)), ArrayInfo((1, 2, 0, 64)), ArrayInfo((1, 2, 0, 64)))
    assert [name[-8:] for name, *_ in launches.made] == ["_prepare", "6_finish"]


@pytest.mark.parametrize(
    ("dims", "options", "changes", "name"),
    [
        ((64, 64), {}, {}, "d64_f16"),
        ((40, 40), {"causal": True}, {}, "d64_f16_bounded"),
        ((61, 61), {}, {}, "d64_f16_bounded_unaligned"),
        ((192, 96), {}, {}, "d192x96_f16"),
        ((128, 128), {"softcap": 2.0}, {}, "d128_f16_bounded_softcap"),
        ((128, 128), {}, {"aligned": False}, "d128_f16_bounded_unaligned"),
    ],
)
def test_variants(
    dims: tuple[int, int],
    options: dict[str, Any],
    changes: dict[str, Any],
    name: str,
    launches: Launches,
) -> None:
    q, v = (ArrayInfo((1, 2, 50, dim), **changes) for dim in dims)
    plan = launch(q, q, v, **options)
    assert plan.tiling.launch.module.name == f"cuflash_bwd_sm80_{name}"
    config = dict(plan.tiling.launch.module.config)
    for key, dim in zip(("head_dim", "head_dim_v"), dims, strict=True):
        assert int(config[key]) >= dim


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize(
    "dims", [(d, v) for d in sm80_tiles._TILES for v in sm80_tiles._TILES], ids=str
)
def test_tiles_fit_the_device(capability: str, dims: tuple[int, int]) -> None:
    device = named(capability)
    q, v = (ArrayInfo((1, 4, 100, dim)) for dim in dims)
    plan = cuflash.explain(q, q, v, device=device, kernel="sm80", backward=True)
    main = plan.tiling.launch
    assert main is not None
    variant = sm80._Variant.of(plan.spec)
    tile = variant.tile(device)
    assert sm80_tiles.fits(tile, *dims, device)
    assert main.shared_memory == tile.shared_memory(*dims) <= device.shared_memory_per_block
    padded = [tile.padded(dim) for dim in dims]
    registers = tile.registers(*padded) + 50  # what is not sums, by the kernel's budget
    assert registers <= 255
    assert 32 * tile.warps * tile.blocks * registers <= 65536
    assert tile.why
    for dim, columns in zip(dims, padded, strict=True):
        parts = 16 * max(tile.sides, tile.dq_sides)
        assert dim <= columns <= -(-dim // 64) * 64
        assert columns % parts == columns % 32 == 0


def test_a_tile_that_cuts_products_is_refused() -> None:
    tile = sm80_tiles._TILES[128][0]
    for changes in ({"keys": 48}, {"q_rows": 16}, {"key_groups": 3}, {"warps": 16}):
        with pytest.raises(ValueError, match=r"^tile: got Tile\("):
            replace(tile, **changes)
    assert isinstance(tile, Tile)


def test_what_is_refused() -> None:
    q = ArrayInfo((1, 2, 50, 64))
    stepped = ArrayInfo((1, 2, 50, 64), strides=(6400, 3200, 64, 0))
    with pytest.raises(NotImplementedError, match="sm80: dout: needs neighbouring elements"):
        cuflash.explain(q, q, q, dout=stepped, device="9.0", kernel="sm80", backward=True)
    bias = ArrayInfo((50, 50), "float32")
    plan = cuflash.explain(q, q, q, bias=bias, device="9.0", backward=True)
    assert plan.family == "standard"
    assert "does not take bias" in str(plan)


def test_a_plan_shows_its_kernel_and_workspace() -> None:
    info = ArrayInfo((2, 4, 300, 128))
    plan = cuflash.explain(
        info, info, info, causal=True, device="9.0", backward=True, kernel="sm80"
    )
    shown = str(plan)
    assert "cuflash backward plan: sm80" in shown
    assert "  kernel     cuflash_bwd_sm80_d128_f16_bounded; " in shown
    assert "  grid       40 blocks of 128 threads, 97 KiB of shared memory each" in shown
    assert "  workspace  1.33 MB" in shown
