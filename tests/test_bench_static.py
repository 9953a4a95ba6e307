"""What is told about kernels without their hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling import needs_compiler

from bench import cli, configurations, limits, sass, static
from bench.configurations import Configuration
from bench.hot_path import main_loop
from bench.sass import parse
from cuflash.precompile import Module
from cuflash.runtime.ptxas import Resources
from cuflash.runtime.specialisation import Specialisation


def configuration(
    family: str, dim: int, q_rows: int, keys: int, warps: int, bits: int = 16, threads: int = 384
) -> Configuration:
    module = Module(family, Specialisation("a.cu", "k"), "sm_90a")
    return Configuration(
        module, (9, 0), dim, q_rows, keys, warps, threads, 200_000, causal=False, bits=bits
    )


def listing(*lines: str) -> str:
    """Instructions as nvdisasm writes them; labels end in a colon."""
    found = []
    for place, line in enumerate(lines):
        found.append(line if line.endswith(":") else f"        /*{16 * place:04x}*/   {line} ;")
    return "\n".join(found)


def tile_loop(keys: int, dim: int, *more: str, mufu: int | None = None) -> str:
    """The loop of a warpgroup: Q and K from shared memory, weights from registers."""
    scores = [f"HGMMA.64x{keys}x16.F32 R88, gdesc[UR44], R88"] * (dim // 16)
    values = [f"HGMMA.64x{dim}x16.F32 R24, R140, gdesc[UR8].tnspB, R24"] * (keys // 16)
    powers = ["MUFU.EX2 R1, R2"] * (keys // 2 if mufu is None else mufu)
    return listing(
        "MOV R1, R2", ".L_x_1:", *scores, *powers, *more, *values, "@P0 BRA `(.L_x_1)", "EXIT"
    )


def test_the_model_has_the_figures_of_two_known_tiles() -> None:
    """Worked by hand: 128 x 176 at dim 128, 192 x 128 at dim 64, with weights in registers."""
    one = configuration("sm90", 128, 128, 176, warps=8)
    found = limits.cycles(one, tile_loop(176, 128))
    assert found.mma == 4 * 128 * 176 * 128 / 4096 == 2816
    assert found.mufu == 128 * 176 / 16 == 1408
    assert found.shared == 1664
    assert found.issue == found.instructions * 8 / 4
    assert found.limiters == ("MMA",)
    assert found.bound == 1.0
    two = configuration("sm90", 64, 192, 128, warps=12)
    found = limits.cycles(two, tile_loop(128, 64, mufu=66))
    assert found.mma == 1536
    assert found.mufu == 1584
    assert found.shared == 960
    assert found.limiters == ("MMA", "MUFU")
    assert found.bound == pytest.approx(1536 / 1584)


def test_8_bits_multiply_twice_as_fast() -> None:
    one = configuration("sm90_fp8", 128, 128, 224, warps=8, bits=8)
    (loop,) = one.loops
    assert loop.products == 128 // 32 + 224 // 32
    scores = ["QGMMA.64x224x32.F32.E4M3.E4M3 R88, gdesc[UR44], R88"] * 4
    values = ["QGMMA.64x128x32.F32.E4M3.E4M3 R24, R140, gdesc[UR8], R24"] * 7
    powers = ["MUFU.EX2 R1, R2"] * 112
    text = listing(".L_x_1:", *scores, *powers, *values, "@P0 BRA `(.L_x_1)")
    found = limits.cycles(one, text)
    assert found.mma == 1792
    assert found.mufu == 1792
    assert found.shared == 1024


def test_what_is_done_rarely_does_not_count() -> None:
    """Behind a branch: weights made again, and references moved."""
    one = configuration("sm90", 64, 64, 64, warps=4)
    rare = ["@P1 BRA `(.L_x_2)", *["FMUL R1, R2, R3"] * 50, ".L_x_2:"]
    scores = ["HGMMA.64x64x16.F32 R88, gdesc[UR44], R88"] * 4
    values = ["HGMMA.64x64x16.F32 R24, R140, gdesc[UR8], R24"] * 4
    powers = ["MUFU.EX2 R1, R2"] * 32
    text = listing(".L_x_1:", *scores, *powers, *rare, *values, "@P0 BRA `(.L_x_1)", ".L_x_3:")
    found = limits.cycles(one, text)
    assert found.instructions == 4 + 32 + 1 + 4 + 1
    assert "float" not in found.mix
    # But a way past the exponentials themselves is none.
    past = ["@P1 BRA `(.L_x_2)", *powers, ".L_x_2:"]
    text = listing(".L_x_1:", *scores, *past, *values, "@P0 BRA `(.L_x_1)")
    assert limits.cycles(one, text).mix["special"] == 32


def test_a_loop_inside_counts_with_its_turns() -> None:
    """As the sm80 kernel has it where Q K^T is not wholly unrolled."""
    inner = [".L_x_2:", *["HMMA.16816.F32 R0, R4, R8, R0"] * 8, "LDSM.16.M88.4 R4, [R1]",
             "@P1 BRA `(.L_x_2)"]  # fmt: skip
    outer = [*["MUFU.EX2 R1, R2"] * 4, *["HMMA.16816.F32 R0, R4, R8, R0"] * 16]
    text = listing(".L_x_1:", *inner, *outer, "BRA `(.L_x_1)")
    weighted = main_loop(text, needed=40, exponentials=4)
    counts: dict[str, float] = {}
    for instruction, weight in weighted:
        name = sass.opcode(instruction)
        counts[name] = counts.get(name, 0) + weight
    assert counts == {
        "HMMA.16816.F32": 40, "LDSM.16.M88.4": 3, "MUFU.EX2": 4, "BRA": 4
    }  # fmt: skip
    for needed in (41, 24 - 8 + 7):
        with pytest.raises(ValueError, match="no loop has"):
            main_loop(text, needed, exponentials=4)


def test_loops_inside_have_as_many_turns_each() -> None:
    """As the sm80 backward kernel has it, of S and of dP."""
    mma = "HMMA.16816.F32 R0, R4, R8, R0"
    first = [".L_x_2:", *[mma] * 4, "@P1 BRA `(.L_x_2)"]
    second = [".L_x_3:", *[mma] * 4, "@P1 BRA `(.L_x_3)"]
    text = listing(
        ".L_x_1:", *first, *["MUFU.EX2 R1, R2"] * 4, *second, *[mma] * 8, "BRA `(.L_x_1)"
    )
    weighted = main_loop(text, needed=8 + 3 * 8, exponentials=4)
    assert sum(weight for _, weight in weighted) == 3 * (4 + 1) * 2 + 4 + 8 + 1
    within = [".L_x_2:", mma, *second, "@P1 BRA `(.L_x_2)"]
    text = listing(".L_x_1:", *within, *["MUFU.EX2 R1, R2"] * 4, *[mma] * 8, "BRA `(.L_x_1)")
    with pytest.raises(ValueError, match="no loop has"):
        main_loop(text, needed=8 + 3 * 5, exponentials=4)


def test_warpgroups_with_loops_of_their_own_are_added_up() -> None:
    """Of the backward pass at dim 192: one makes weights and dV of them, the other has dK."""
    module = Module(
        "sm90_backward", Specialisation("a.cu", "a", (("dq_chunks", 1),), exact_arch=True), "sm_90a"
    )
    one = Configuration(module, (9, 0), 192, 64, 64, 8, 384, 0, causal=False, parts=2)
    assert one.loops == ((4, 12 + 4 + 4, 32), (4, 12 + 4 + 4, 0))
    mma = ["HGMMA.64x64x16.F32 R88, gdesc[UR44], R88"] * 20
    weights = [".L_x_1:", *mma, *["MUFU.EX2 R1, R2"] * 32, "@P0 BRA `(.L_x_1)"]
    of_keys = [".L_x_2:", *mma, *["FMUL R1, R2, R3"] * 60, "@P0 BRA `(.L_x_2)"]
    found = limits.cycles(one, listing(*weights, *of_keys))
    assert found.mma == 10 * 64 * 64 * 192 / 4096
    assert found.mufu == 32 * 4 * 32 / 16
    assert found.instructions == ((20 + 32 + 1) + (20 + 60 + 1)) / 2
    assert found.issue == (20 + 32 + 1) + (20 + 60 + 1)
    assert found.mix["products"] == 20
    assert found.mix["float"] == 30


def test_two_tiles_by_turns_are_halved() -> None:
    body = ["HGMMA.64x64x16.F32 R0, R4, gdesc[UR8], R0"] * 6
    text = listing(".L_x_1:", *body, *["MUFU.EX2 R1, R2"] * 8, "@P0 BRA `(.L_x_1)")
    weighted = main_loop(text, needed=3, exponentials=4)
    assert sum(weight for _, weight in weighted) == (6 + 8 + 1) / 2


def test_a_kernel_without_the_loop_is_told() -> None:
    text = listing(".L_x_1:", "HMMA.16816.F32 R0, R4, R8, R0", "BRA `(.L_x_1)")
    with pytest.raises(ValueError, match="no loop has the 12 products"):
        main_loop(text, needed=12, exponentials=1)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("HGMMA.64x80x16.F32 R88, gdesc[UR44], RZ, !UPT", (80 + 64) * 32 / 4),
        ("HGMMA.64x128x16.F32 R24, R140, gdesc[UR8].tnspB, R24, gsb0", 128 * 32 / 4),
        ("IGMMA.64x64x32.S8.S8 R88, gdesc[UR44], R88", (64 + 64) * 32 / 4),
        ("@!PT LDSM.16.M88.4 R4, [R1]", 512),
        ("LDSM.16.MT88.4 R4, [R1]", 512),
        ("LDSM.16.M88 R4, [R1]", 128),
        ("LDS.128 R4, [R1]", 512),
        ("LDS.64 R4, [R1]", 256),
        ("LDS R4, [R1]", 128),
        ("STS.U16 [R1], R4", 64),
        ("STSM.16.M88.4 [R1], R4", 512),
        ("FFMA R1, R2, R3, R4", 0),
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64]", 0),
    ],
)
def test_bytes_of_shared_memory(instruction: str, expected: float) -> None:
    assert limits.shared_bytes(instruction) == expected


def test_blocks_share_registers_memory_and_threads() -> None:
    one = configuration("sm90", 128, 128, 128, warps=8, threads=384)
    assert limits.resident_blocks(one, Resources(registers=168)) == 1
    small = Configuration(
        one.module, (8, 9), 64, 128, 128, 4, threads=128, shared_memory=48 << 10, causal=False
    )
    assert limits.resident_blocks(small, Resources(registers=255)) == 2
    assert limits.resident_blocks(small, Resources(registers=255, static_shared=4096)) == 1
    assert limits.resident_blocks(small, Resources(registers=64)) == 2


def test_loops_are_read_with_their_nesting() -> None:
    mma = "HMMA.16816.F32 R0, R4, R8, R0"
    text = listing(
        ".L_x_0:", mma, ".L_x_1:", mma, "@P0 BRA `(.L_x_1)", ".L_x_2:", "NOP", "BRA `(.L_x_2)",
        "@P1 BRA `(.L_x_3)", "BRA `(.L_x_0)", ".L_x_3:", "EXIT",
    )  # fmt: skip
    found = parse(text)
    assert [(loop.first, loop.last) for loop in found.loops] == [(1, 3), (0, 7)]
    assert found.targets == {2: 1, 4: 3, 5: 7, 6: 0}
    assert found.loops[1].holds(found.loops[0])
    assert sass.inner_loops(text) == [[mma, "@P0 BRA `(.L_x_1)"]]


@needs_compiler
def test_configurations_are_what_calls_meet_on_each_architecture() -> None:
    found = configurations.tuned()
    archs = {one.module.arch for one in found}
    assert {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"} <= archs
    assert len({(one.name, one.module.arch) for one in found}) == len(found)
    assert {one.module.family for one in found} == set(static.FAMILIES)
    hopper = [one for one in found if one.module.family == "sm90"]
    assert {one.head_dim for one in hopper} == {64, 96, 128, 192, 256}
    assert all(one.q_rows == 16 * one.warps for one in hopper)
    with pytest.raises(ValueError, match="nothing is compiled for sm_80"):
        configurations.tuned(["sm_80"], families=["sm90"])


@needs_compiler
@pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
def test_a_small_kernel_is_compiled_and_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "static.json"
    arguments = ["static", "--archs", "sm_80", "--dims", "32", "--families", "sm80"]
    arguments += ["--json", str(file)]
    assert cli.main(arguments) == 0
    rows = json.loads(file.read_text())["benches"]["static"]
    assert {(row["dim"], row["causal"]) for row in rows} == {(32, False), (32, True)}
    for row in rows:
        assert row["arch"] == "sm_80"
        assert 0 < row["registers"] <= 255
        assert row["spilled_bytes"] == 0
        assert row["resident_blocks"] == 2
        assert row["mma"] == 4 * 128 * 128 * 32 / 2048
        # The exponentials of every score, and at most a few more for the rows.
        assert 128 * 128 / 16 <= row["mufu"] < 1.1 * 128 * 128 / 16
        assert row["mix"]["products"] * 4096 * row["warps"] == 4 * 128 * 128 * 32
        assert row["limiters"]
    assert "sm_80" in capsys.readouterr().out


@needs_compiler
@pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
@pytest.mark.parametrize(("dim", "tile"), [(64, (128, 128)), (128, (64, 128)), (192, (64, 64))])
def test_the_backward_pass_on_9_0_is_near_what_shared_memory_gives(
    dim: int, tile: tuple[int, int]
) -> None:
    (one,) = (
        one for one in configurations.tuned(["sm_90a"], [dim], ["sm90_backward"]) if not one.causal
    )
    row = static.describe(one)
    assert (one.q_rows, one.keys) == tile
    assert "shared memory" in row["limiters"], row
    assert 1.0 <= row["shared"] / row["mma"] < 1.25
    assert row["mufu"] == pytest.approx(one.q_rows * one.keys / 16, rel=0.02)
    assert row["mix"]["products"] * row["warps"] == sum(
        loop.products * loop.warps for loop in one.loops
    )


@needs_compiler
@pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
@pytest.mark.parametrize(("dim", "limiters"), [(64, ["MMA", "MUFU"]), (128, ["MMA"])])
def test_the_limiters_on_9_0_are_those_that_the_design_is_for(
    dim: int, limiters: list[str]
) -> None:
    """At dim 64 exponentials take as long as products; at 128 half as long."""
    for one in configurations.tuned(["sm_90a"], [dim], ["sm90"]):
        row = static.describe(one)
        assert row["limiters"] == limiters, row
        assert row["mufu"] == pytest.approx(one.q_rows * one.keys / 16, rel=0.02)


def test_without_a_compiler_the_bench_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> tuple[int, int]:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(static.compiler, "nvrtc_version", missing)
    assert cli.main(["static"]) == 0
    assert "static: needs CuPy and NVRTC: No module named 'cupy'" in capsys.readouterr().out
