"""`cuflash info | explain | check`: output, exit status, and that `check` can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from spoiled_family import spoil_results

import cuflash
from cuflash import check, cli, dispatch, families
from cuflash.operands import Operands
from cuflash.plan import Plan

Capture = pytest.CaptureFixture[str]
SHAPE = ("--shape", "2,8,4096,64")


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command in this process."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    output = capsys.readouterr()
    return status, output.out, output.err


def run_json(capsys: Capture, *arguments: str) -> Any:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


# --- info, help, version ------------------------------------------------------------------------


def test_info(capsys: Capture) -> None:
    status, out, err = run(capsys, "info")
    assert (status, err) == (0, "")
    assert out == f"{cuflash.info()}\n"


def test_info_as_json(capsys: Capture) -> None:
    assert run_json(capsys, "info") == json.loads(json.dumps(cuflash.info().to_dict()))


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version") == (0, f"cuflash {cuflash.__version__}\n", "")


@pytest.mark.parametrize(
    "command",
    [(), ("info",), ("explain",), ("check",), ("warmup",), ("cache",), ("fp8-error",)],
    ids=str,
)
def test_help_shows_examples_that_parse(command: tuple[str, ...], capsys: Capture) -> None:
    status, out, err = run(capsys, *command, "--help")
    assert (status, err) == (0, "")
    _, _, examples = out.partition("examples:\n")
    lines = [line.split() for line in examples.partition("\n\n")[0].splitlines()]
    assert lines
    for program, *arguments in lines:
        assert program == "cuflash"
        assert not command or arguments[0] == command[0]
        cli._parser().parse_args(arguments)


def test_help_of_the_whole_names_the_environment(capsys: Capture) -> None:
    assert "CUFLASH_LOG" in run(capsys, "--help")[1]


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "explain", "--shape", "4,100,64", "--device", "8.0"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cuflash plan: sm80 on sm_80")


# --- explain --------------------------------------------------------------------------------------


def test_explain_prints_the_plan_and_the_traffic(capsys: Capture) -> None:
    status, out, err = run(capsys, "explain", *SHAPE, "--causal", "--device", "9.0")
    assert (status, err) == (0, "")
    info = cuflash.ArrayInfo((2, 8, 4096, 64))
    plan = cuflash.explain(info, info, info, causal=True, device="9.0")
    assert out.startswith(f"{plan}\n")
    (traffic,) = out[len(str(plan)) :].strip().splitlines()
    assert "standard attention 2.18 GB (2.15 GB of it scores), tiled 33.6 MB" in traffic


def test_explain_passes_every_option_on(capsys: Capture) -> None:
    found = run_json(
        capsys, "explain", "--shape", "3x9x100x64", "--kv-heads", "3", "--kv-len", "70",
        "--head-dim-v", "32", "--dtype", "bfloat16", "--causal-align", "top_left",
        "--window", "5,none", "--softcap", "2.5", "--scale", "-0.5", "--return-lse",
        "--kernel", "standard", "--device", "sm_86",
    )  # fmt: skip
    expected = {
        "batch": 3, "q_heads": 9, "kv_heads": 3, "q_len": 100, "kv_len": 70, "head_dim": 64,
        "head_dim_v": 32, "dtype": "bfloat16", "top_left": True, "left": 5, "right": None,
        "softcap": 2.5, "scale": -0.5, "return_lse": True,
    }  # fmt: skip
    assert {name: found["spec"][name] for name in expected} == expected
    assert found["family"] == "standard"
    assert found["device"]["compute_capability"] == [8, 6]
    assert found["io_bytes"]["standard"]["scores"] == 4 * 3 * 9 * 100 * 70 * 2
    assert found["io_bytes"]["tiled"]["scores"] == 0


def test_explain_of_the_backward_pass(capsys: Capture) -> None:
    info = cuflash.ArrayInfo((2, 8, 4096, 64))
    plan = cuflash.explain(info, info, info, softcap=3.0, device="9.0", backward=True)
    command = ("explain", *SHAPE, "--softcap", "3", "--device", "9.0", "--backward")
    assert run(capsys, *command) == (0, f"{plan}\n", "")
    assert run_json(capsys, *command) == json.loads(json.dumps(plan.to_dict()))
    status, _, err = run(capsys, *command, "--return-lse")
    assert status == 2
    assert "unknown option 'return_lse'" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--shape", "100,64"), (1, 1, 1, 100, 100)),
        (("--shape", "100,64", "--kv-len", "7"), (1, 1, 1, 100, 7)),
        (("--shape", "6,100,64", "--kv-heads", "2"), (1, 6, 2, 100, 100)),
        (("--shape", "100,6,64", "--layout", "bshd", "--kv-heads", "2"), (1, 6, 2, 100, 100)),
        (
            ("--shape", "2,100,6,64", "--layout", "bshd", "--kv-heads", "3", "--kv-len", "9"),
            (2, 6, 3, 100, 9),
        ),
        (("--shape", "100,64", "--layout", "bshd", "--kv-len", "9"), (1, 1, 1, 100, 9)),
    ],
    ids=str,
)
def test_explain_shapes(
    arguments: tuple[str, ...], expected: tuple[int, ...], capsys: Capture
) -> None:
    spec = run_json(capsys, "explain", *arguments, "--device", "cpu")["spec"]
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
    assert tuple(spec[name] for name in names) == expected


@pytest.mark.parametrize("window", ["none,0", "None,0", "0,0", "256,none", "none,none"])
def test_explain_windows(window: str, capsys: Capture) -> None:
    spec = run_json(capsys, "explain", *SHAPE, "--window", window, "--device", "cpu")["spec"]
    expected = [None if part.lower() == "none" else int(part) for part in window.split(",")]
    assert [spec["left"], spec["right"]] == expected


def test_explain_without_a_gpu_is_about_the_cpu(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert run_json(capsys, "explain", *SHAPE)["family"] == "reference"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ["command"]),
        (("explian",), ["explian", "explain"]),
        (("explain",), ["--shape"]),
        (("explain", "--shape", "2,8,x,64"), ["--shape", "'2,8,x,64'", "2,8,4096,64"]),
        (("explain", "--shape", ""), ["--shape", "''"]),
        (("explain", "--shape", "64"), ["shape"]),
        (("explain", "--shape", "64", "--kv-len", "5"), ["shape"]),
        (("explain", "--shape", "1,1,8,100,64"), ["(1, 1, 8, 100, 64)", "expected"]),
        (("explain", "--shape", "8,100,-64"), ["-64"]),
        (("explain", "--shape=-8,100,64"), ["-8"]),
        (("explain", "--shape", "8,100,300"), ["q: got head_dim 300", "1 to 256"]),
        (("explain", "--shape", "100,64", "--kv-heads", "2"), ["--kv-heads", "no heads axis"]),
        (("explain", *SHAPE, "--kv-heads", "3"), ["3 kv heads for 8 query heads"]),
        (("explain", *SHAPE, "--window", "5"), ["--window", "'5'", "LEFT,RIGHT"]),
        (("explain", *SHAPE, "--window", "5,x"), ["--window", "'5,x'", "256,0"]),
        (("explain", *SHAPE, "--window", "1,2,3"), ["--window", "'1,2,3'"]),
        (("explain", *SHAPE, "--window=-1,0"), ["window", "(-1, 0)", ">= 0"]),
        (("explain", *SHAPE, "--kernel", "sm9"), ["--kernel", "'sm9'", "sm90"]),
        (("explain", *SHAPE, "--dtype", "half"), ["--dtype", "'half'", "float16"]),
        (("explain", *SHAPE, "--softcap", "0"), ["softcap: got 0.0", "> 0"]),
        (("explain", *SHAPE, "--scale", "nan"), ["scale: got nan", "finite"]),
        (("explain", *SHAPE, "--device", "h100"), ["device: got 'h100'", "9.0"]),
        (
            ("explain", *SHAPE, "--device", "8.0", "--kernel", "sm90"),
            ["kernel='sm90'", "compute capability 9.0, not 8.0"],
        ),
        (("explain", *SHAPE, "--device", "9.0", "--dtype", "float64"), ["float64"]),
        (("check", "--family", "sm9"), ["--family", "'sm9'", "standard", "reference"]),
        (("check", "--dtype", "float16,half"), ["--dtype", "'half'", "bfloat16"]),
        (("check", "--seed", "x"), ["--seed", "'x'"]),
        (("check", "--family", "sm90_fp8"), ["nothing was run"]),
    ],
    ids=lambda part: " ".join(part)[:50],
)
def test_bad_input_is_told_and_exits_with_2(
    arguments: tuple[str, ...], says: list[str], capsys: Capture
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert "Traceback" not in err
    for fragment in says:
        assert fragment in err
    if arguments[:1] == ("explain",):
        assert out == ""


# --- check ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked() -> list[check.Result]:
    """One whole check of the CPU family in two dtypes."""
    return list(check.run(("reference",), ("float16", "float64"), seed=1))


def test_check_covers_every_problem_and_passes(checked: list[check.Result]) -> None:
    assert {r.dtype for r in checked} == {"float16", "float64"}
    assert len(checked) == 2 * len(check.PROBLEMS)
    for result in checked:
        assert (result.family, result.device, result.note) == ("reference", "CPU", "")
        assert result.passed, result
        assert result.error is not None
        assert 0 <= result.error <= check.TOLERANCE[result.dtype]


def test_check_has_a_problem_of_several_tiles() -> None:
    """Else the step from one tile of keys to the next would go unchecked on the CPU."""
    cut = []
    for problem in check.PROBLEMS:
        batch, heads, kv_heads, q_len, kv_len, dim, dim_v = problem.shape
        q = cuflash.ArrayInfo((batch, heads, q_len, dim), "float32", "cpu")
        k, v = (
            cuflash.ArrayInfo((batch, kv_heads, kv_len, d), "float32", "cpu") for d in (dim, dim_v)
        )
        if cuflash.explain(q, k, v).tiling.keys < kv_len:
            cut.append(problem.name)
    assert cut


def test_check_prints_a_line_for_each(capsys: Capture) -> None:
    status, out, err = run(
        capsys, "check", "--family", "reference", "--dtype", "float32,bfloat16", "--seed", "7"
    )
    assert (status, err) == (0, "")
    header, *lines, summary = out.splitlines()
    assert header.split() == ["family", "dtype", "problem", "error", "lse", "error", "result"]
    assert len(lines) == 2 * len(check.PROBLEMS)
    assert {line.split()[1] for line in lines} == {"float32", "bfloat16"}
    assert all(line.endswith("pass") for line in lines)
    assert summary == f"{len(lines)} of {len(lines)} passed, on CPU"


def test_check_as_json_repeats_with_its_seed(capsys: Capture) -> None:
    arguments = ("check", "--family", "reference", "--dtype", "float32", "--seed")
    first, again, other = (run_json(capsys, *arguments, seed) for seed in ("3", "3", "4"))
    assert first == again
    assert first != other
    assert {result["dtype"] for result in first} == {"float32"}
    assert all(result["passed"] is True for result in first)


def test_check_without_a_seed_is_fresh(capsys: Capture) -> None:
    arguments = ("check", "--family", "reference", "--dtype", "float32")
    assert run_json(capsys, *arguments) != run_json(capsys, *arguments)


def slightly_wrong(plan: Plan, operands: Operands) -> None:
    """One element off by 1/64, where the values averaged are of size 1."""
    operands.out[0, -1, -1, 3] += 2.0**-6


def unwritten(plan: Plan, operands: Operands) -> None:
    operands.out[-1, 0, 0, -1] = np.nan


def wrong_lse(plan: Plan, operands: Operands) -> None:
    operands.lse[0, 0, -1] += 1e-3


def lse_of_an_empty_row(plan: Plan, operands: Operands) -> None:
    operands.lse[np.isneginf(operands.lse)] = 0


def not_zero_in_an_empty_row(plan: Plan, operands: Operands) -> None:
    empty = np.isneginf(operands.lse)
    operands.out[empty] = 1e-7


@pytest.fixture
def break_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let the CPU family finish, then spoil what it wrote."""
    family = families.load("reference")

    def spoil_with(spoil: Callable[[Plan, Operands], None]) -> None:
        def spoil_views(plan: Plan, operands: Operands) -> None:
            if operands.lse is not None:
                spoil(plan, operands.views(plan.spec))

        spoil_results(monkeypatch, family, spoil_views)

    yield spoil_with
    dispatch._choose.cache_clear()


@pytest.mark.parametrize(
    ("spoil", "everywhere"),
    [
        (slightly_wrong, True),
        (unwritten, True),
        (wrong_lse, True),
        (lse_of_an_empty_row, False),
        (not_zero_in_an_empty_row, False),
    ],
)
def test_check_notices_a_wrong_family(
    spoil: Callable[..., None], everywhere: bool, break_reference: Any, capsys: Capture
) -> None:
    break_reference(spoil)
    arguments = ("check", "--family", "reference", "--dtype", "float16", "--seed", "0")
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    failed = [line for line in out.splitlines() if line.endswith("FAIL")]
    # One row or element may be of no key, or of weight 0, in a few problems.
    assert len(failed) >= (len(check.PROBLEMS) - 2 if everywhere else 2)
    assert out.splitlines()[-1].startswith(f"{len(check.PROBLEMS) - len(failed)} of ")
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 1
    assert sum(not result["passed"] for result in json.loads(out)) == len(failed)


def test_check_counts_what_was_refused_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    good = check.Result("sm80", "GPU 0", "float16", "full", 1e-4, 1e-6, True)
    refused = check.Result("sm80", "GPU 0", "float16", "mask", None, None, True, "refused: mask")
    monkeypatch.setattr(check, "run", lambda *_: iter([good, good, refused]))
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert out.splitlines()[-1] == "2 of 2 passed, 1 refused, on GPU 0"
