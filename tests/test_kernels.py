"""Every kernel of every family compiles, for the architectures that it serves, without spills."""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from compiling import needs_compiler

from cuflash import families
from cuflash.precompile import Module, list_modules
from cuflash.runtime import cache, device
from cuflash.runtime.ptxas import Resources

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32")
FEW = 20  # modules of a family, more of which would take minutes for all architectures
TILE = ("keys", "groups", "cluster", "resident", "ping_pong")  # of the sm90 family
BACKWARD_TILE = ("head_dim", "head_dim_v", "q_rows", "keys", "capped", "ordered", "lengths")
COMPILED = {("standard", arch) for arch in ARCHITECTURES} | {("sm90", "sm_90")}
BACKWARD = " backward"  # behind a family's name: the kernels of its other pass
PASSES = (*families.BUILT, *(f"{name}{BACKWARD}" for name in families.BACKWARD_BUILT))


def load(name: str) -> families.Family:
    """The module of one of `PASSES`."""
    family = name.removesuffix(BACKWARD)
    return families.load(family) if family == name else families.load_backward(family)


def modules_of(name: str, arch: str, everything: bool) -> list[Module]:
    """The modules to compile for an architecture; of a large family, its share of them."""
    family = name.removesuffix(BACKWARD)
    try:
        modules = list_modules([device.named(arch)], [family])
    except RuntimeError as error:
        pytest.skip(str(error))
    own = set(load(name).specialisations(device.named(arch), range(1, 257), DTYPES))
    modules = [m for m in modules if m.specialisation in own]
    if everything or len(modules) <= FEW:
        return modules
    serving = [a for a in ARCHITECTURES if serves(name, a)]
    dealt = max(len(serving), -(-len(modules) // FEW))
    turn = serving.index(arch)
    found = [m for m in modules if zlib.crc32(m.specialisation.name.encode()) % dealt == turn]
    if serving == [arch]:  # no other architecture has what is missing here
        seen = {trait for m in found for trait in traits(m)}
        for m in modules:
            if not seen.issuperset(traits(m)):
                found.append(m)
                seen.update(traits(m))
    return found


def traits(module: Module) -> set[Any]:
    """What at least one of a share has to have: each value of the configuration, and each tile with
    each form of scores, since capped ones spill first.
    """
    config = dict(module.specialisation.config)
    return {*config.items(), tile_and_scores(module)}


def tile_and_scores(module: Module) -> tuple[Any, ...]:
    config = dict(module.specialisation.config)
    keys = (*TILE, "scores") if "scores" in config else BACKWARD_TILE
    return tuple(config.get(key) for key in keys)


def serves(family: str, arch: str) -> bool:
    """Whether a family has kernels for an architecture."""
    return bool(load(family).specialisations(device.named(arch), [64], ["float16"]))


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", PASSES)
def test_every_kernel_compiles_without_spills(
    family: str, arch: str, pytestconfig: pytest.Config
) -> None:
    """A large family's each for one of the architectures, of one that serves few of them a share,
    or with `--all-kernels` everything.

    From the cache where it holds them; its key has all that could change the outcome.
    """
    modules = modules_of(family, arch, pytestconfig.getoption("--all-kernels"))
    if not modules:
        assert (family, arch) not in COMPILED
        return
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(_resources, modules))
    faults = [
        f"{kernel} for {module.arch}: {resources}"
        for module, kernels in zip(modules, found, strict=True)
        for kernel, resources in kernels.items()
        if resources.spill_stores or resources.spill_loads or resources.warnings
    ]
    assert not faults, "\n".join(faults)
    for module, kernels in zip(modules, found, strict=True):
        assert kernels, module
        for kernel, resources in kernels.items():
            assert kernel.startswith("cuflash_"), "profilers show whose kernel it is"
            assert 0 < resources.registers <= 255


def _resources(module: Module) -> dict[str, Resources]:
    return cache.get(module.specialisation, module.arch, show_progress=False).resources


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", PASSES)
def test_families_name_their_modules_apart(family: str, arch: str) -> None:
    """Names tell configurations apart in profilers and messages; each is listed once."""
    listed = functools.partial(load(family).specialisations, device.named(arch))
    specs = listed(range(1, 257), DTYPES)
    assert len(set(specs)) == len(specs)
    assert len({spec.name for spec in specs}) == len(specs)
    assert listed([], DTYPES) == listed([64], []) == []


def test_the_standard_family_is_among_them() -> None:
    """Else the tests above might be about nothing."""
    family = families.load("standard")
    assert len(family.specialisations(device.named("9.0"), [64], ["float16", "bfloat16"])) == 4
    assert len(COMPILED) == len(ARCHITECTURES) + 1


@needs_compiler
def test_kernels_for_one_architecture_alone_are_compiled_for_it() -> None:
    """And those dealt to the tests above have every tile and way among them."""
    modules = modules_of("sm90", "sm_90", everything=False)
    assert {module.arch for module in modules} == {"sm_90a"}
    everything = modules_of("sm90", "sm_90", everything=True)
    assert FEW // 2 < len(modules) < len(everything)
    for key in (
        "head_dim",
        "keys",
        "groups",
        "cluster",
        "resident",
        "left",
        "bounded",
        "scores",
        "lengths",
        "out_element",
        "parted",
        "panel",
        "ordered",
    ):
        dealt, all_of_them = (
            {dict(module.specialisation.config).get(key) for module in some}
            for some in (modules, everything)
        )
        assert dealt == all_of_them, key
    assert {tile_and_scores(m) for m in modules} == {tile_and_scores(m) for m in everything}
    assert not any(modules_of("sm90", arch, everything=True) for arch in ("sm_80", "sm_100"))
