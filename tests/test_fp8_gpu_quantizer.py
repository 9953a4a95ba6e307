"""What quantises on a GPU, as far as no GPU is needed: its kernels compile and its blocks fit."""

from __future__ import annotations

import dataclasses

import pytest
from compiling import needs_compiler

from cuflash.fp8 import PRESETS, Fp8Recipe, gpu_quantizer
from cuflash.fp8.gpu_quantizer import Shapes
from cuflash.runtime import cache

DIMS = (64, 128, 256)
SHARED_MEMORY = 228 << 10  # of a multiprocessor of compute capability 9.0
RESERVED = 1 << 10  # of it for each block
SHAPES = Shapes(2, 8, 4, 1000, 1200, 128, key_blocks=24, v_chunks=5, q_chunks=4, k_chunks=5)


@needs_compiler
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mixed", ["all", "32", "none"])
def test_kernels_compile_without_spills(mixed: str, dim: int, dtype: str, qk_dtype: str) -> None:
    together = {"all": dim, "32": 32, "none": 1}[mixed]
    module = gpu_quantizer.specialisation(dim, dtype, qk_dtype, together)
    resources = cache.get(module, "sm_90a", show_progress=False).resources
    assert set(resources) == {f"cuflash_fp8_{name}" for name in ("statistics", "summary", "codes")}
    for kernel, used in resources.items():
        assert not used.spill_stores + used.spill_loads, f"{kernel}: {used}"
        assert not used.warnings


@needs_compiler
def test_kernels_that_share_scales_by_128_rows_compile_without_spills() -> None:
    module = gpu_quantizer.specialisation(256, "float16", "int8", 256, shared_by_128=True)
    resources = cache.get(module, "sm_90a", show_progress=False).resources
    assert not any(used.spill_stores + used.spill_loads for used in resources.values())


@pytest.mark.parametrize("shared_by_128", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_a_multiprocessor_holds_its_blocks_of_codes(dim: int, shared_by_128: bool) -> None:
    module = gpu_quantizer.specialisation(dim, "float16", "e4m3", dim, shared_by_128=shared_by_128)
    config = dict(module.config)
    resident, bytes_of_block = config["resident"], config["shared_memory"]
    assert isinstance(resident, int)
    assert isinstance(bytes_of_block, int)
    static = 512  # at most
    assert resident * (bytes_of_block + static + RESERVED) <= SHARED_MEMORY


def test_a_recipe_costs_no_statistics_that_it_does_not_need() -> None:
    def chunks(**changes: bool) -> int:
        recipe: Fp8Recipe = dataclasses.replace(PRESETS["f8"], **changes)
        return gpu_quantizer._cuts(recipe, SHAPES, 132)["statistics"][0]

    of_q, of_k = 2 * 8 * 4, 2 * 4 * 5
    of_v = of_k
    assert chunks() == of_q + of_k + of_v
    assert chunks(balance=False) == of_k + of_v
    assert chunks(center_k=False) == of_q + of_k + of_v
    assert chunks(balance=False, center_k=False) == of_v


def test_no_more_blocks_than_tiles_or_than_fit_at_once() -> None:
    tiles = 2 * (8 * 8 + 4 * 12 + 4 * 12)
    assert SHAPES.tiles(128) == tiles
    assert SHAPES.tiles(64) == 2 * tiles
    cuts = {sms: gpu_quantizer._cuts(PRESETS["f8"], SHAPES, sms)["codes"] for sms in (2, 132)}
    assert cuts[2][0] == 2 * 3
    assert cuts[132][0] == tiles


def test_what_begins_as_0_are_counts_and_sums() -> None:
    names = list(SHAPES.places)
    first = names.index("value_tiles")
    assert names[first : first + 3] == ["value_tiles", "code_sums", "k_means"]
    assert SHAPES.places["k_means"] - SHAPES.places["code_sums"] >= 8 * 2 * 4 * 128
