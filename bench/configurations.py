"""Every tuned configuration of the fused kernels, by architecture, without the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cuflash import ArrayInfo, explain
from cuflash.families import sm90_fp8
from cuflash.fp8.emulate import REFERENCE_KEYS
from cuflash.fp8.recipe import recipe_of
from cuflash.precompile import Module
from cuflash.runtime import compiler
from cuflash.runtime.device import Device, named

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DIMS = (32, 64, 96, 128, 192, 256)
_LENGTHS = (1024, 4096, 16384)  # on which tiles depend
_WARPS = 4  # of a warpgroup, one of which loads on 9.0
_FP8_DIMS = (64, 128, 256)
FORWARD = ("sm80", "sm90", "sm90_fp8")
BACKWARD = ("sm80_backward", "sm90_backward")


class Loop(NamedTuple):
    """A main loop, of so many warps: for one tile its matrix instructions, of a warp or of a
    warpgroup, and its exponentials, of a warp.
    """

    warps: int
    products: int
    exponentials: int


@dataclass(frozen=True, slots=True)
class Configuration:
    """A kernel as it is compiled for an architecture, and what its blocks work on.

    `warps` are those that multiply; `bits` are those of an element of q and k; `parts` of warps
    have a loop each.
    """

    module: Module
    capability: tuple[int, int]
    head_dim: int
    q_rows: int
    keys: int
    warps: int
    threads: int
    shared_memory: int
    causal: bool
    bits: int = 16
    parts: int = 1

    @property
    def name(self) -> str:
        """Of the kernel, as profilers show it."""
        return self.module.specialisation.name

    @property
    def is_backward(self) -> bool:
        """Whether it is of the backward pass, which multiplies five times for two."""
        return self.module.family in BACKWARD

    @property
    def operations(self) -> float:
        """Of the products of a tile of queries and keys."""
        return (10.0 if self.is_backward else 4.0) * self.q_rows * self.keys * self.head_dim

    @property
    def loops(self) -> tuple[Loop, ...]:
        """One; or where warpgroups share keys, that of weights and that of their gradients."""
        warps = self.warps // self.parts
        exponentials = self.q_rows * self.keys // (32 * warps)
        of_all = Loop(warps, self._products, exponentials)
        return (of_all, Loop(warps, self._products, 0))[: self.parts]

    @property
    def _products(self) -> int:
        step = 256 // self.bits  # depth of one instruction
        if self.module.family in ("sm80", "sm80_backward"):
            return round(self.operations / (2 * 16 * 8 * step)) // self.warps
        if not self.is_backward:
            return self.head_dim // step + self.keys // step
        config = dict(self.module.specialisation.config)
        of_dq = self.keys // step * int(config["dq_chunks"])
        return 2 // self.parts * (self.head_dim // step + self.q_rows // step) + of_dq


def tuned(
    archs: Sequence[str] = ARCHITECTURES,
    dims: Sequence[int] = DIMS,
    families: Sequence[str] = (*FORWARD, *BACKWARD),
) -> list[Configuration]:
    """Each kernel that float16 problems of these head dims may meet, once.

    Raises
    ------
    ValueError
        For an architecture that has no name, and where nothing is left.
    RuntimeError
        For one that the compiler does not know.
    """
    found: dict[tuple[str, str], Configuration] = {}
    for arch in archs:
        device = named(arch)
        for family in families:
            for one in _of_family(family, device, dims):
                found.setdefault((one.name, one.module.arch), one)
    if not found:
        raise ValueError(f"--archs, --dims, --families: nothing is compiled for {', '.join(archs)}")
    return list(found.values())


def _of_family(family: str, device: Device, dims: Iterable[int]) -> Iterator[Configuration]:
    capability = device.compute_capability
    if capability is None:
        raise ValueError(f"--archs: got {device.name!r}; expected such as sm_90a")
    if not family.startswith("sm80") and capability != (9, 0):
        return
    for dim in dims:
        for causal in (False, True):
            if family == "sm90_fp8":
                yield from _of_8_bits(capability, dim, causal)
            elif family in BACKWARD:
                yield _of_gradients(family, device, capability, dim, causal)
            else:
                yield from _of_16_bits(family, device, capability, dim, causal)


def _of_16_bits(
    family: str, device: Device, capability: tuple[int, int], dim: int, causal: bool
) -> Iterator[Configuration]:
    for length in _LENGTHS:
        array = ArrayInfo((1, 8, length, dim), "float16", "cuda:0")
        tiling = explain(array, array, array, causal=causal, device=device, kernel=family).tiling
        launch = tiling.launch
        assert launch is not None
        exact = launch.module.exact_arch
        loading = _WARPS if family == "sm90" else 0
        yield Configuration(
            Module(family, launch.module, compiler.loadable_architecture(capability, exact)),
            capability,
            int(dict(launch.module.config)["head_dim"]),
            tiling.q_rows,
            tiling.keys,
            launch.threads // 32 - loading,
            launch.threads,
            launch.shared_memory,
            causal,
        )


def _of_gradients(
    family: str, device: Device, capability: tuple[int, int], dim: int, causal: bool
) -> Configuration:
    array = ArrayInfo((1, 8, 4096, dim), "float16", "cuda:0")
    tiling = explain(
        array, array, array, causal=causal, device=device, kernel=family.removesuffix("_backward"),
        backward=True,
    ).tiling  # fmt: skip
    launch = tiling.launch
    assert launch is not None
    config, exact = dict(launch.module.config), launch.module.exact_arch
    return Configuration(
        Module(family, launch.module, compiler.loadable_architecture(capability, exact)),
        capability,
        int(config["head_dim"]),
        tiling.q_rows,
        tiling.keys,
        launch.threads // 32 - (_WARPS if family == "sm90_backward" else 0),
        launch.threads,
        launch.shared_memory,
        causal,
        parts=2 if config.get("parted") else 1,
    )


def _of_8_bits(capability: tuple[int, int], dim: int, causal: bool) -> Iterator[Configuration]:
    if dim not in _FP8_DIMS:
        return
    for name in ("f8", "i8"):
        recipe = recipe_of(name)
        variant = sm90_fp8.Variant(
            dim, recipe.qk_dtype, recipe.reference, "float16", causal, False, False,
            recipe.first_tile_16bit,
        )  # fmt: skip
        module = sm90_fp8.specialisation(variant)
        groups = variant.tile.groups
        yield Configuration(
            Module("sm90_fp8", module, compiler.loadable_architecture(capability, True)),
            capability,
            dim,
            variant.tile.q_rows,
            REFERENCE_KEYS,
            _WARPS * groups,
            32 * _WARPS * (groups + 1),
            variant.shared_memory,
            causal,
            bits=8,
        )
