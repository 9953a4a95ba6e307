"""Every kernel of every family compiles, for the architectures that it serves, without spills."""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from compiling import needs_compiler

from cuflash import families
from cuflash.precompile import Module, list_modules
from cuflash.runtime import cache, device
from cuflash.runtime.ptxas import Resources

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FEW = 20  # modules of a family, more of which would take minutes for all architectures
COMPILED = {("standard", arch) for arch in ARCHITECTURES}


def modules_of(family: str, arch: str, everything: bool) -> list[Module]:
    """The modules to compile for an architecture; of a large family, its share of them."""
    try:
        modules = list_modules([device.named(arch)], [family])
    except RuntimeError as error:
        pytest.skip(str(error))
    if everything or len(modules) <= FEW:
        return modules
    turn = ARCHITECTURES.index(arch) - 1  # sm_75 has the standard family alone
    dealt = len(ARCHITECTURES) - 1
    return [m for m in modules if zlib.crc32(m.specialisation.name.encode()) % dealt == turn]


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", families.BUILT)
def test_every_kernel_compiles_without_spills(
    family: str, arch: str, pytestconfig: pytest.Config
) -> None:
    """A large family's each for one of the architectures, or with `--all-kernels` for every one.

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
@pytest.mark.parametrize("family", families.BUILT)
def test_families_name_their_modules_apart(family: str, arch: str) -> None:
    """Names tell configurations apart in profilers and messages; each is listed once."""
    listed = functools.partial(families.load(family).specialisations, device.named(arch))
    dtypes = ("float16", "bfloat16", "float32")
    specs = listed(range(1, 257), dtypes)
    assert len(set(specs)) == len(specs)
    assert len({spec.name for spec in specs}) == len(specs)
    assert listed([], dtypes) == listed([64], []) == []


def test_the_standard_family_is_among_them() -> None:
    """Else the tests above might be about nothing."""
    family = families.load("standard")
    assert len(family.specialisations(device.named("9.0"), [64], ["float16", "bfloat16"])) == 4
    assert len(COMPILED) == len(ARCHITECTURES)
