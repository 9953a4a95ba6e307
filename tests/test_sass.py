"""The machine code of the kernels has the instructions that their speed rests on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from compiling import disassemble, needs_compiler

from bench.sass import inner_loops, opcode, parse
from cuflash import ArrayInfo, explain
from cuflash.families import sm90_fp8
from cuflash.runtime import cache, device

pytestmark = needs_compiler


def opcodes(kernel: str, arch: str, *, dim: int, causal: bool) -> Counter[str]:
    """How often each instruction stands in the kernel of a call."""
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(array, array, array, causal=causal, device=device.named(arch), kernel=kernel)
    assert plan.tiling.launch is not None
    entry = cache.get(plan.tiling.launch.module, arch, show_progress=False)
    return Counter(map(opcode, parse(disassemble(entry.path.read_bytes())).code))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_sm80_multiplies_on_tensor_cores_and_loads_asynchronously(
    arch: str, dim: int, causal: bool
) -> None:
    found = opcodes("sm80", arch, dim=dim, causal=causal)
    assert found["HMMA.16816.F32"] >= 64
    for name in ("LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128", "MUFU.EX2"):
        assert found[name], f"{name} is not among {sorted(found)}"
    local = [name for name in found if name.startswith(("STL", "LDL"))]
    assert not local, "registers go to memory"


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_the_backward_pass_of_sm80_keeps_its_operands_on_chip(
    arch: str, dim: int, deterministic: bool
) -> None:
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(
        array, array, array, causal=True, device=device.named(arch), kernel="sm80",
        backward=True, deterministic=deterministic,
    )  # fmt: skip
    assert plan.tiling.launch is not None
    entry = cache.get(plan.tiling.launch.module, arch, show_progress=False)
    found = Counter(map(opcode, parse(disassemble(entry.path.read_bytes())).code))
    for name in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128"):
        assert found[name], f"{name} is not among {sorted(found)}"
    assert not [name for name in found if name.startswith(("STL", "LDL"))]
    sums = [name for name in found if name.startswith("RED") and "F32" in name]
    assert sums, "dQ is added up in memory"
    if arch == "sm_90":
        assert all("128" in name or "x4" in name.lower() for name in sums), sums
    for name in ("NANOSLEEP", "MEMBAR.ALL.GPU"):
        assert bool(found[name]) == deterministic, "none waits for its turn but those that have one"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_sm90_has_wide_products_and_tensor_copies(dim: int, causal: bool) -> None:
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(array, array, array, causal=causal, device="9.0", kernel="sm90")
    keys = plan.tiling.keys
    found = opcodes("sm90", "sm_90a", dim=dim, causal=causal)
    for name in (f"HGMMA.64x{keys}x16.F32", f"HGMMA.64x{dim}x16.F32"):
        assert found[name], f"{name} is not among {sorted(found)}"
    assert any(name.startswith("UTMALDG.4D") for name in found)
    assert any(name.startswith("UTMASTG.4D") for name in found)
    local = [name for name in found if name.startswith(("STL", "LDL"))]
    assert not local, "registers go to memory"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_the_inner_loops_of_sm90_are_short_and_fence_nothing(dim: int, causal: bool) -> None:
    """A fence of all memory at each arrival costs a quarter; instructions cost energy."""
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(array, array, array, causal=causal, device="9.0", kernel="sm90")
    assert plan.tiling.launch is not None
    entry = cache.get(plan.tiling.launch.module, "sm_90a", show_progress=False)
    loops = inner_loops(disassemble(entry.path.read_bytes()))
    products = dim // 16 + plan.tiling.keys // 16
    whole = [loop for loop in loops if sum("HGMMA" in line for line in loop) == products]
    shortest = min(map(len, whole))
    for loop in whole:
        if len(loop) < 1.5 * shortest:  # else it is the way back from a wait that stands elsewhere
            assert not any("MEMBAR" in line for line in loop)
    # An exponential, a product, a sum, half a maximum and half a conversion for each score a thread
    # has; two of three branches that are hardly ever taken: a maximum, and subtracting a reference
    # that is beyond 2^24; the third scales out. The rest is addresses, barriers, products.
    scores, out = plan.tiling.keys // 2, dim // 2
    assert shortest <= 6 * scores + out + 240


def backward_loops(dim: int, **options: Any) -> tuple[dict[str, Any], str, list[list[str]]]:
    """Configuration of a backward pass, the machine code of its main kernel, and its loops."""
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(array, array, array, device="9.0", kernel="sm90", backward=True, **options)
    assert plan.tiling.launch is not None
    module = plan.tiling.launch.module
    entry = cache.get(module, "sm_90a", show_progress=False)
    functions = disassemble(entry.path.read_bytes()).split(".section\t.text.")
    (main,) = (one for one in functions if one.startswith(module.name))
    return dict(module.config), main, inner_loops(main)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_the_backward_pass_of_sm90_has_wide_products_and_bulk_additions(
    dim: int, options: dict[str, Any]
) -> None:
    config, main, _ = backward_loops(dim, **options)
    rows, columns = config["q_rows"], dim // (1 if config["share"] == "LINES" else 2)
    for width in (rows, dim, columns // config["dq_chunks"]):
        assert f"HGMMA.64x{width}x16.F32" in main
    for name in ("UTMALDG.4D", "UTMASTG.4D", "UBLKCP", "UBLKRED.G.S.ADD.F32", "STSM.16.MT88.4"):
        assert name in main
    assert not any(name in main for name in ("STL", "LDL"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_inner_loops_of_the_backward_pass_are_short_and_fence_once(
    dim: int, causal: bool
) -> None:
    """A fence waits for all that is under way in shared memory; one of all memory costs more."""
    config, _, loops = backward_loops(dim, causal=causal)
    rows = config["q_rows"]
    products = 2 * dim // 16 + 2 * rows // 16 + config["keys"] // 16
    whole = [loop for loop in loops if sum("HGMMA" in line for line in loop) == products]
    assert len(whole) >= 2, "with and without hidden pairs"
    shortest = min(map(len, whole))
    for loop in whole:
        if len(loop) < 2 * shortest:  # else it is the way back from a wait that stands elsewhere
            text = "\n".join(loop)
            assert not any(name in text for name in ("MEMBAR.ALL.GPU", "MEMBAR.SC", "STL", "LDL"))
            assert text.count("FENCE.VIEW.ASYNC") == 1
    # A product and a power, a difference, a product and two halves of conversions for each score a
    # thread has; a unit of four for each row statistic and sum of dQ. The rest is addresses,
    # barriers and products.
    assert shortest <= 5 * (rows // 2) + rows // 8 + 16 + 3 * products + 150, shortest


@pytest.mark.parametrize("bounded", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_inner_loop_of_8_bits_multiplies_and_fences_nothing(
    dim: int, qk_dtype: str, bounded: bool
) -> None:
    """On two tiles of 64 keys, by turns from one set of registers to another."""
    variant = sm90_fp8.Variant(dim, qk_dtype, "lagging", "float16", bounded, False, False, False)
    module = sm90_fp8.specialisation(variant)
    entry = cache.get(module, "sm_90a", show_progress=False)
    (resources,) = entry.resources.values()
    assert resources.spill_stores == 0
    assert not resources.warnings
    assembly = disassemble(entry.path.read_bytes())
    assert "UTMALDG.4D" in assembly
    assert "UTMASTG.4D" in assembly
    queries = {"e4m3": "QGMMA.64x64x32.F32.E4M3.E4M3", "int8": "IGMMA.64x64x32.S8.S8"}[qk_dtype]
    values = f"QGMMA.64x{dim}x32.F32.E4M3.E4M3"
    steps = 2 * (dim // 32 + 64 // 32)
    # Others with as many are ways back from waits that stand elsewhere.
    loop = min(
        (x for x in inner_loops(assembly) if sum("GMMA" in line for line in x) == steps), key=len
    )
    assert sum(queries in line for line in loop) >= 2 * dim // 32
    assert sum(values in line for line in loop) >= 2 * 64 // 32
    assert not any(name in line for line in loop for name in ("MEMBAR", "STL", "LDL"))
    # A power, a product, a sum and half a conversion for each score that a thread has, of integers
    # a conversion more; scaling out, and moving references, which are passed over mostly.
    scores, out = 32, dim // 2
    per_score = {"e4m3": 3.5, "int8": 4.5}[qk_dtype]
    assert len(loop) <= 2 * (per_score * scores + out + 385), len(loop)
