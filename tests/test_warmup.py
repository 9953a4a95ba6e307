"""`warmup()` and the commands about compiled kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compiling import FakeCompiler, needs_compiler
from test_cli import Capture, run, run_json

import cuflash
from cuflash import families, precompile
from cuflash.families import standard
from cuflash.precompile import Built
from cuflash.runtime import cache, compiler, device
from cuflash.runtime.compiler import Compiled, CompileError

Patch = pytest.MonkeyPatch
DTYPES = ("float16", "bfloat16", "float32")
STANDARD = {spec.name for spec in standard.specialisations(device.named("9.0"), [64], DTYPES)}


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def fake(monkeypatch: Patch) -> FakeCompiler:
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80, 86, 90, 100))
    monkeypatch.setattr(families, "BUILT", ("standard", "reference"))
    monkeypatch.setattr(families, "IN_8_BITS", ())
    return FakeCompiler(monkeypatch)


def test_all_modules_are_compiled_then_found(fake: FakeCompiler) -> None:
    seen: list[tuple[int, int]] = []
    results = cuflash.warmup(
        ["sm_75", "9.0"], progress=lambda built, done, total: seen.append((done, total))
    )
    assert {built.arch for built in results} == {"sm_75", "sm_90"}
    assert {built.name for built in results if built.arch == "sm_90"} == STANDARD
    # cuBLAS does not multiply bfloat16 there, so the weights are float32.
    names = {built.name for built in results if built.arch == "sm_75"}
    assert names == {name.replace("standard_bf16", "standard_f32") for name in STANDARD}
    assert len(fake.calls) == len(results) == 2 * len(STANDARD)
    assert seen == [(n, len(results)) for n in range(1, len(results) + 1)]
    assert not any(built.cached or built.error for built in results)

    again = cuflash.warmup(["sm_75", "9.0"])
    assert len(fake.calls) == len(again) == len(results)
    assert all(built.cached and built.seconds == 0.5 for built in again)


def test_it_compiles_what_a_call_will_ask_for(fake: FakeCompiler) -> None:
    cuflash.warmup("sm_90", dtype="bfloat16")
    for bias in ("bfloat16", "float32"):
        spec = standard._specialisation("bfloat16", bias, "bfloat16")
        assert cache.peek(spec, "sm_90") is not None


def test_selections(fake: FakeCompiler) -> None:
    def names(*arguments: Any, **choice: Any) -> set[str]:
        return {built.name for built in cuflash.warmup(*arguments, **choice)}

    half = {"cuflash_standard_f16_f16_f16", "cuflash_standard_f16_f32_f16"}
    assert names("sm_90", dtype="float16") == half
    assert names("sm_90", dtype=("float16", "float32")) == half | {"cuflash_standard_f32_f32_f32"}
    assert names("sm_90", head_dim=64) == names("sm_90", head_dim=[64, 80]) == STANDARD
    assert names("sm_90", family="reference") == set()
    assert len(cuflash.warmup(["sm_90", "9.0", "90"], dtype="float32")) == 1
    # The compiler knows no 8.7, and a device of it runs the cubin of 8.6.
    assert {built.arch for built in cuflash.warmup("8.7")} == {"sm_86"}


def test_a_family_is_asked_for_what_it_takes_alone(fake: FakeCompiler, monkeypatch: Patch) -> None:
    asked = []

    class Picky:
        def supports(self, spec: Any, device: Any) -> list[str]:
            fits = spec.head_dim % 64 == 0 and spec.dtype == "float16"
            return [] if fits and device.compute_capability >= (8, 0) else ["no"]

        def specialisations(self, device: Any, dims: Any, dtypes: Any) -> list[Any]:
            asked.append((list(dims), list(dtypes)))
            return []

    monkeypatch.setattr(families, "load", lambda name: Picky())
    cuflash.warmup(["7.5", "8.0"], family="standard", dtype=["float16", "float32"])
    assert asked == [
        ([], ["float16"]), ([], ["float32"]), ([64, 128, 192, 256], ["float16"]), ([], ["float32"])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ({"arch": "h100"}, ValueError, "device: got 'h100'"),
        ({"arch": "cpu"}, ValueError, "arch: got 'CPU'"),
        ({"arch": "12.0"}, RuntimeError, "NVRTC 13.0 compiles for sm_75, .*, not for sm_120"),
        ({"arch": "9.0", "family": "sm9"}, ValueError, "family: got 'sm9'"),
        ({"arch": "9.0", "dtype": "half"}, ValueError, "dtype: got 'half'"),
        ({"arch": "9.0", "head_dim": 257}, ValueError, "head_dim: got 257; expected 1 to 256"),
        ({}, ValueError, "arch: none given, and no GPU is here"),
    ],
)
def test_bad_choices_are_told(
    choice: dict[str, Any],
    error: type[Exception],
    says: str,
    fake: FakeCompiler,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(precompile, "cuda_devices", list)
    with pytest.raises(error, match=says):
        cuflash.warmup(**choice)
    assert fake.calls == []


def test_the_gpus_of_this_machine_are_the_default(fake: FakeCompiler, monkeypatch: Patch) -> None:
    gpus = [device.Device("cuda", "x", n, (8, 6)) for n in range(2)]
    monkeypatch.setattr(precompile, "cuda_devices", lambda: gpus)
    assert [built.arch for built in cuflash.warmup(dtype="float32")] == ["sm_86"]


def test_without_a_compiler_it_says_what_to_install(monkeypatch: Patch) -> None:
    def missing() -> Any:
        raise ImportError("no CuPy")

    monkeypatch.setattr(compiler, "nvrtc_version", missing)
    with pytest.raises(RuntimeError, match=r"pip install 'cuflash\[compile\]'.*no CuPy"):
        cuflash.warmup("sm_90")


# --- commands ------------------------------------------------------------------------------------


def test_warmup_prints_a_line_for_each(fake: FakeCompiler, capsys: Capture, folder: Path) -> None:
    arguments = ("warmup", "--arch", "sm_80,9.0", "--dtype", "float16", "--family", "standard")
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    *lines, summary = out.splitlines()
    assert [line.split()[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert {line.split()[2] for line in lines} == {"sm_80", "sm_90"}
    assert all(line.endswith("0.50 s") for line in lines)
    assert summary.startswith("4 modules: 4 compiled, 0 cached, 0 failed, in ")
    assert summary.endswith(str(folder))
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert all(line.endswith("  cached") for line in out.splitlines()[:-1])
    assert "0 compiled, 4 cached" in out


def test_warmup_as_json(fake: FakeCompiler, capsys: Capture) -> None:
    (built,) = run_json(capsys, "warmup", "--arch", "sm_80", "--dtype", "float32")
    assert Built(**built) == Built(
        "standard", "cuflash_standard_f32_f32_f32", "sm_80", 0.5, cached=False
    )


def test_a_failure_is_told_and_the_rest_compiled(
    fake: FakeCompiler, capsys: Capture, monkeypatch: Patch
) -> None:
    def fail_one(text: str, arch: str, name: str, **options: Any) -> Compiled:
        if name == "cuflash_standard_f16_f32_f16":
            raise CompileError(name, arch, "softmax.cu(7): error: no")
        return fake.compile(text, arch, name)

    monkeypatch.setattr(compiler, "compile_cubin", fail_one)
    status, out, err = run(capsys, "warmup", "--arch", "sm_80", "--dtype", "float16")
    assert status == 1
    assert "cuflash_standard_f16_f32_f16  sm_80  FAILED" in out
    assert "2 modules: 1 compiled, 0 cached, 1 failed" in out
    assert "softmax.cu(7): error: no" in err
    status, out, _ = run(capsys, "warmup", "--arch", "sm_80", "--dtype", "float16", "--json")
    assert status == 1
    assert [bool(built["error"]) for built in json.loads(out)].count(True) == 1


def test_modules_that_are_not_kept_are_a_failure(
    fake: FakeCompiler, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    status, out, err = run(capsys, "warmup", "--arch", "sm_80", "--dtype", "float32")
    assert status == 1
    assert "FAILED" in out
    assert "can't be written" in err


def test_a_selection_of_nothing_is_an_error(fake: FakeCompiler, capsys: Capture) -> None:
    status, out, err = run(capsys, "warmup", "--arch", "sm_80", "--family", "reference")
    assert (status, out) == (2, "")
    assert "no family compiles anything" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--arch", "sm"), ["device: got 'sm'"]),
        (("--head-dim", "64,x"), ["--head-dim", "'64,x'"]),
        (("--dtype", "half"), ["--dtype", "'half'"]),
        (("--family", "sm9"), ["--family", "'sm9'"]),
    ],
)
def test_bad_arguments_exit_with_2(
    arguments: tuple[str, ...], says: list[str], fake: FakeCompiler, capsys: Capture
) -> None:
    status, out, err = run(capsys, "warmup", *arguments)
    assert (status, out) == (2, "")
    for fragment in says:
        assert fragment in err


def test_cache_info_and_clear(fake: FakeCompiler, capsys: Capture, folder: Path) -> None:
    cuflash.warmup(["sm_80", "sm_90"], dtype="float16")
    (folder / "notes.txt").write_text("mine")
    status, out, _ = run(capsys, "cache", "info")
    assert status == 0
    assert out.startswith(f"{folder}: 4 compiled modules, ")
    assert out.splitlines()[1:] == ["  sm_80    2", "  sm_90    2"]
    found = run_json(capsys, "cache", "info")
    assert (found["entries"], found["architectures"]) == (4, {"sm_80": 2, "sm_90": 2})
    described = cuflash.info()
    assert (described.cache_folder, described.cache_modules) == (str(folder), 4)
    assert described.cache_bytes == found["bytes"]
    assert f"{folder}, 4 compiled modules" in str(described)

    assert run(capsys, "cache", "clear") == (0, f"4 modules removed, {folder}\n", "")
    assert run_json(capsys, "cache", "clear") == {"folder": str(folder), "removed": 0}
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_cache_needs_to_be_told_what(capsys: Capture) -> None:
    status, _, err = run(capsys, "cache")
    assert status == 2
    assert "action" in err


@needs_compiler
def test_a_real_warmup(folder: Path) -> None:
    (built,) = cuflash.warmup("sm_90", family="standard", dtype="float32")
    assert (built.error, built.cached) == ("", False)
    assert built.seconds > 0
    (cubin,) = folder.glob("*.cubin")
    assert cubin.read_bytes().startswith(b"\x7fELF")
