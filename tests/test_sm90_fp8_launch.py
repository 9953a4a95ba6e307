"""What the 8-bit family hands to its kernel, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import ArrayInfo, precompile
from cuflash.families import sm90, sm90_fp8
from cuflash.families.sm90_fp8 import Variant
from cuflash.fp8 import PRESETS, Fp8Recipe, gpu_quantizer
from cuflash.fp8.emulate import REFERENCE_KEYS as KEYS
from cuflash.fp8.gpu_quantizer import Codes
from cuflash.fp8.inputs import checked_spec
from cuflash.fp8.rotation import rotation_of
from cuflash.operands import adopt_all
from cuflash.runtime.device import named
from cuflash.runtime.specialisation import Specialisation
from cuflash.runtime.tensormap import Layout
from cuflash.spec import AttentionSpec, Options

HOPPER = named("9.0")
CODES = Codes(None, *range(0x1000, 0xA000, 0x1000))
OUT, LSE, LENS, COUNTER = 0xA000, 0xB000, 0xC000, 0xD000
NAMES = {
    CODES.q_codes: "q", CODES.k_codes: "k", CODES.v_codes: "v", OUT: "out",
    CODES.first_values: "first",
}  # fmt: skip
DIMS = (24, 64, 96, 128, 200, 256)


def spec_of(dim: int = 128, **options: Any) -> AttentionSpec:
    """Of 2 entries, 8 query and 2 kv heads, 1,000 queries and 1,500 keys."""
    q = ArrayInfo((2, 8, 1000, dim), "float16", "cuda:0")
    k = ArrayInfo((2, 2, 1500, dim), "float16", "cuda:0")
    operands = adopt_all(q, k, k, None, None, None, None, None, "bhsd", stand_ins=True)
    return checked_spec(operands, Options(layout="bhsd", **options))


class Kernel:
    """Stands for a compiled kernel, its launcher, the maker of tensor maps and the counters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.maps: dict[str, Layout] = {}
        self.arguments: Any = None
        function = SimpleNamespace(function=lambda name: self)
        patch.setattr(sm90_fp8.module, "load", lambda module, device: function)
        patch.setattr(sm90_fp8, "launcher", self.launcher)
        patch.setattr(sm90_fp8.tensormap, "at", self.map_at)
        counters = SimpleNamespace(address=lambda: COUNTER)
        patch.setattr(sm90_fp8.tickets, "counters", lambda index: counters)

    def launcher(
        self, kernel: Any, blocks: int, threads: int, shared_memory: int, changing: Struct,
        struct: bytes, *, early: bool,
    ) -> Callable[..., None]:  # fmt: skip
        assert early  # for which the kernel waits
        self.blocks, self.threads, self.shared_memory = blocks, threads, shared_memory

        def launch(*values: Any) -> None:
            given = changing.pack(*values) + struct[changing.size :]
            self.arguments = np.frombuffer(given, sm90.ARGUMENTS)[0]

        return launch

    def map_at(self, layout: Layout, address: int) -> bytes:
        self.maps[NAMES[address]] = layout
        return address.to_bytes(8, "little") * 16

    def run(self, spec: AttentionSpec, recipe: Fp8Recipe) -> Any:
        sm90_fp8.prepare(spec, recipe, HOPPER)(CODES, OUT, LSE, 0, LENS)
        return self.arguments


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_every_argument_reaches_the_kernel(kernel: Kernel) -> None:
    found = kernel.run(spec_of(scale=0.25, causal=True), PRESETS["f8"])
    for address, name in NAMES.items():
        assert (found[name] == address).all()
    given = {
        "lse": LSE, "q_lens": 0, "kv_lens": LENS, "counter": COUNTER,
        "q_scales": CODES.q_scales, "k_scales": CODES.k_scales, "v_scales": CODES.v_scales,
        "v_means": CODES.v_means, "lse_shifts": CODES.lse_shifts,
        "q_heads": 8, "group": 4, "q_len": 1000, "kv_len": 1500, "key_blocks": 24,
    }  # fmt: skip
    assert {name: int(found[name]) for name in given} == given
    assert found["factor"] == np.float32(0.25 / np.log(2))
    assert kernel.blocks == min(132, found["tickets"])


@pytest.mark.parametrize(
    ("options", "lengths", "drawn"),
    [({}, False, False), ({}, True, True), ({"causal": True}, False, True)],
)
def test_work_is_drawn_where_it_takes_unequal_times(
    options: dict[str, Any], lengths: bool, drawn: bool, kernel: Kernel
) -> None:
    spec, recipe = dataclasses.replace(spec_of(**options), has_kv_lens=lengths), PRESETS["f8"]
    assert int(kernel.run(spec, recipe)["counter"]) == COUNTER * drawn
    tiling = sm90_fp8.plan(spec, recipe, HOPPER)
    assert ("work by tickets" in tiling.note) == drawn
    assert tiling.launch is not None
    assert dict(tiling.launch.module.config)["dynamic"] == drawn


@pytest.mark.parametrize("dim", DIMS)
def test_boxes_bring_the_bytes_that_are_waited_for(dim: int, kernel: Kernel) -> None:
    """Fewer would have the kernel wait for ever."""
    spec = spec_of(dim)
    kernel.run(spec, PRESETS["f8"])
    bucket = Variant.of(spec, PRESETS["f8"]).head_dim
    row = min(bucket, 128)  # of Q and K in shared memory
    q, k, v, out, first = (kernel.maps[name] for name in ("q", "k", "v", "out", "first"))
    assert q.box[0] * bucket // row * np.prod(q.box[1:]) == bucket * 64
    assert k.box[0] * k.box[2] * (bucket // row) == KEYS * bucket
    assert v.box[0] * v.box[2] == KEYS * bucket
    assert out.box[0] * 2 == 128
    assert first.box[0] * first.box[2] * 2 == 128 * 2 * KEYS  # a panel
    for name, layout in kernel.maps.items():
        item_size = 2 if name in ("out", "first") else 1
        assert layout.dtype == {1: "uint8", 2: "float16"}[item_size]
        assert layout.box[0] * item_size == layout.swizzle_bytes
        assert all(step % 16 == 0 for step in layout.byte_strides)
    assert (q.swizzle_bytes, k.swizzle_bytes, v.swizzle_bytes) == (row, row, KEYS)
    assert q.sizes == (bucket, 8, 1000, 2)
    assert q.byte_strides == (1000 * bucket, bucket, 8000 * bucket)
    assert v.sizes[0] % KEYS == 0
    assert v.sizes[0] >= 1500


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("reference", ["lagging", "tile"])
@pytest.mark.parametrize("first", [False, True])
def test_what_the_kernel_is_compiled_for(first: bool, reference: str, dim: int) -> None:
    recipe = Fp8Recipe(reference=reference, first_tile_16bit=first)
    variant = Variant.of(spec_of(dim), recipe)
    assert variant.shared_memory <= 232_448
    config = dict(sm90_fp8.specialisation(variant).config)
    assert config["shared_memory"] == variant.shared_memory
    assert config["lagging"] == (reference == "lagging")
    assert config["first"] == first
    assert config["keys"] == KEYS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reference": "running"}, "takes reference lagging or tile, not running"),
        ({"v_block": 64}, "takes v_block channel, not 64"),
        ({"rotation": "orthogonal"}, "no matrix"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    (found,) = sm90_fp8.reasons_against(spec_of(), Fp8Recipe(**changes), HOPPER)
    assert reason in found
    assert sm90_fp8.reasons_against(spec_of(), PRESETS["f8"], HOPPER) == []
    older = named("8.0")
    assert "needs compute capability 9.0, not 8.0" in sm90_fp8.reasons_against(
        spec_of(), PRESETS["f8"], older
    )


@pytest.mark.parametrize("dim", [64, 96, 128, 24])
def test_what_is_compiled_ahead_is_what_calls_of_presets_load(dim: int) -> None:
    known = set(sm90_fp8.specialisations(HOPPER, [dim, 33], ["float16", "float32"]))
    asked: set[Specialisation] = set()
    for name, lens in itertools.product(("f8", "i8", "f8+", "i8+"), (None, [10, 20])):
        recipe = PRESETS[name]
        mixed = rotation_of(recipe, dim, 2).block
        bucket = sm90_fp8.bucket_of(dim)
        asked.add(gpu_quantizer.specialisation(bucket, "float16", recipe.qk_dtype, mixed))
        for masks in ({}, {"causal": True}, {"window": (30, 4)}):
            spec = spec_of(dim, kv_lens=None if lens is None else np.array(lens), **masks)
            asked.add(sm90_fp8.specialisation(Variant.of(spec, recipe)))
    assert known == asked
    assert not sm90_fp8.specialisations(named("8.0"), [dim], ["float16"])


def test_warmup_has_them() -> None:
    modules = precompile.list_modules([HOPPER], ["sm90_fp8"], [128], ["bfloat16"])
    assert {module.arch for module in modules} == {"sm_90a"}
    expected = set(sm90_fp8.specialisations(HOPPER, [128], ["bfloat16"]))
    assert {module.specialisation for module in modules} == expected
    everything = precompile.list_modules([HOPPER], (), [128], ["bfloat16"])
    assert set(modules) < set(everything)
    assert not precompile.list_modules([named("8.0")], ["sm90_fp8"])
