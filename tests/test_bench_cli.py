"""The bench's front door: what it takes, what it refuses, and what it does without a GPU."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import all as everything
from bench import cli, columns, host, quantize, race, runner
from bench.race import Pace
from bench.results import Results, load
from bench.session import Session, add_rates, ratios
from bench.shapes import Problem, select
from cuflash.runtime import device

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    *("all", "forward", "backward", "fp8", "quantize", "host", "compile", "memory", "io", "static"),
    *("report", "compare"),
)
needs_no_gpu = pytest.mark.skipif(not device.unavailable_reason(), reason="there is a GPU")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda c: "".join(c))
def test_every_command_has_help_with_examples(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m bench {' '.join(command)}".strip() in shown
    assert "examples:" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["forward", "--list", "papers"], "argument --list: got 'papers'; expected of paper, gqa"),
        (["forward", "--dims", "64,x"], "argument --dims: got 'x'; expected a whole number"),
        (["forward", "--dims", "0"], "argument --dims: got '0'; expected a whole number from 1"),
        (["forward", "--dtypes", "int8"], "argument --dtypes: got 'int8'; expected of float16"),
        (["forward", "--masks", "half"], "argument --masks: got 'half'; expected of full, causal"),
        (["forward", "--peers", "fa5"], "argument --peers: got 'fa5'; expected of fa3"),
        (["forward", "--kernel", "sm70"], "argument --kernel: invalid choice: 'sm70'"),
        (["forward", "--budget", "-1"], "argument --budget: got '-1'; expected a number above 0"),
        (["forward", "--rounds", "0"], "argument --rounds: got '0'"),
        (
            ["forward", "--against", "nowhere"],
            "argument --against: got 'nowhere'; expected a",
        ),
        (["fp8", "--recipes", "f9"], "argument --recipes: got 'f9'; expected of f8, i8"),
        (["static", "--archs", "sm_70"], "argument --archs: got 'sm_70'; expected of sm_80"),
        (["compare", "only.json"], "the following arguments are required: NEW.json"),
        (["sideways"], "argument command: invalid choice: 'sideways'"),
        ([], "the following arguments are required: command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_are_wrong_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@needs_no_gpu
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["forward", "--list", "cpu", "--dims", "80"], "nothing of the list 'cpu' is left"),
        (["forward", "--peers", "fa3"], "--peers: 'fa3' does not run here; expected of blas"),
        (["memory", "--seqs", "64,128"], "--seqs: got 2; a fit needs 3 or more"),
        (["io", "--seqs", "1000"], "--seqs: got 1000; expected divisors of 16,384"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_choices_that_do_not_fit_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m bench {words[0]}: ")
    assert said in error


@needs_no_gpu
def test_without_a_gpu_the_cpu_family_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [Problem(1, 2, 2, 64, 64, 16, "float32", causal) for causal in (False, True)]
    monkeypatch.setitem(select.__globals__["LISTS"], "cpu", small)
    file = tmp_path / "run.json"
    words = ["forward", "--rounds", "2", "--window-ms", "1", "--json", str(file)]
    assert cli.main(words) == 0
    record = load(file)
    assert record["command"] == "python -m bench forward --rounds 2 --window-ms 1"
    assert str(tmp_path) not in file.read_text()
    rows = record["benches"]["forward"]
    assert [Problem(**{name: row[name] for name in small[0].to_dict()}) for row in rows] == small
    for row in rows:
        assert set(row["columns"]) == {columns.OURS, "blas"}
        for entry in row["columns"].values():
            assert race.is_ranked(entry)
            assert entry["error"] < 1e-6
            assert entry["tflops"] == pytest.approx(
                4 * 2 * 64 * 64 * 16 / (1 + row["causal"]) / entry["ms"] / 1e9
            )
        assert row["columns"][columns.OURS]["note"].startswith("reference")
    assert "cuflash to blas: geometric mean" in capsys.readouterr().out
    assert record["environment"]["cuflash"]
    assert record["versions"]["numpy"]


@needs_no_gpu
@pytest.mark.parametrize("command", ["backward", "fp8", "quantize", "host", "io"])
def test_without_a_gpu_what_needs_one_says_so(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    assert cli.main([command, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["benches"] == {}
    assert [line.partition(":")[0] for line in record["skipped"]] == [command]
    assert f"{command}: needs a GPU" in capsys.readouterr().out


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    for command in COMMANDS:
        assert f"    {command} " in done.stdout


def test_a_plain_pytest_does_not_collect_the_benchmarks() -> None:
    """And `pytest bench --benchmark-only` collects them alone."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    assert "testpaths = tests cuflash README.md" in (ROOT / "setup.cfg").read_text()
    pytest.importorskip("pytest_benchmark")
    found = subprocess.run(
        [*command, "bench", "--benchmark-only"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    collected = [line for line in found.splitlines() if "::" in line]
    assert len(collected) >= 8
    assert all(line.startswith("bench/test_small.py::test_") for line in collected)


def session(**more: Any) -> Session:
    return Session(Results(["all"]), Pace(rounds=1, settle_ms=0.1, window_ms=0.1), **more)


def test_faults_of_ours_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(run_: Session, chosen: argparse.Namespace) -> None:
        run_.results.add("forward", [{"a": 1}])
        if chosen.fault:
            run_.faults.append("forward: wrong")

    for fault in (False, True):
        chosen = argparse.Namespace(
            words=["forward"], rounds=1, settle_ms=1.0, window_ms=1.0, kernel="auto", against=None,
            budget=None, json=tmp_path / "run.json", bench=bench, fault=fault,
        )  # fmt: skip
        assert runner.run_bench(chosen) == fault
        assert load(chosen.json)["benches"] == {"forward": [{"a": 1}]}
    assert "FAULT  forward: wrong" in capsys.readouterr().err


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    def bench(run_: Session, chosen: argparse.Namespace) -> None:
        run_.results.add("forward", [{"a": 1}])
        raise KeyboardInterrupt

    chosen = argparse.Namespace(
        words=["forward"], rounds=1, settle_ms=1.0, window_ms=1.0, kernel="auto", against=None,
        budget=None, json=tmp_path / "run.json", bench=bench,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        runner.run_bench(chosen)
    assert load(chosen.json)["benches"] == {"forward": [{"a": 1}]}


def test_a_race_ours_loses_itself_in_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem, *_: Any, **__: Any) -> dict[str, Any]:
        entry = {"ms": 1.0, "spread": 0.0, "rounds": 1, "wrong": "relative L2 error 1"}
        return {**problem.to_dict(), "columns": {"cuflash": entry, "fa3": dict(entry)}}

    monkeypatch.setattr(race, "run", wrong)
    run_ = session()
    team = argparse.Namespace(specs={"cuflash": 1, "fa3": 1, "judge": 1}, absent={})
    problem = Problem(1, 1, 1, 8, 8, 8)
    run_.race("forward", [problem], team, ("cuflash",), {}, list="paper")  # type: ignore[arg-type]
    assert run_.faults == [f"forward: {problem}: cuflash: relative L2 error 1"]


def test_out_of_time_is_told_for_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "run", lambda *_, **__: pytest.fail("it had no time"))
    run_ = session(budget_s=1e-9)
    team = argparse.Namespace(specs={"cuflash": 1}, absent={})
    problems = select("decode")
    assert run_.race("forward", problems, team, (), {}) == []  # type: ignore[arg-type]
    assert run_.results.data["skipped"] == [f"forward: {p}: out of time" for p in problems]


def test_rates_are_parts_of_the_ceilings_of_the_run() -> None:
    problem = Problem(1, 2, 2, 1024, 1024, 64)
    row: dict[str, Any] = {
        "columns": {
            "cuflash": {"ms": 2.0}, "f8": {"ms": 1.0}, "fa3": {"failed": "why"},
            "copy": {"ms": 1.0, "work": {"bytes": 3e9}},
        }
    }  # fmt: skip
    ceilings = {
        "matmul float16": {"tflops": 1.0}, "matmul e4m3": {"tflops": 2.0}, "copy": {"gb_s": 4000.0}
    }  # fmt: skip
    add_rates(row, problem, ceilings, {"cuflash": "float16", "f8": "8 bits"})
    ours, codes, failed, copy = row["columns"].values()
    assert ours["tflops"] == pytest.approx(problem.flops / 2e9)
    assert ours["of_matmul"] == pytest.approx(ours["tflops"])
    assert codes["of_matmul"] == pytest.approx(codes["tflops"] / 2)
    assert ours["gb_s"] == pytest.approx(problem.moved_bytes / 2e6)
    assert failed == {"failed": "why"}
    assert copy["gb_s"] == 3000.0
    assert copy["of_copy"] == 0.75
    assert "tflops" not in copy


def test_ratios_are_to_the_fastest_that_is_right() -> None:
    def row(**times: float) -> dict[str, Any]:
        return {"columns": {name: {"ms": time} for name, time in times.items()}}

    rows = [row(cuflash=2.0, a=1.0, b=4.0), row(cuflash=1.0, a=3.0), row(a=1.0)]
    assert ratios(rows, "cuflash", ["a", "b"]) == [0.5, 3.0]
    rows[0]["columns"]["a"]["wrong"] = "why"
    assert ratios(rows, "cuflash", ["a", "b"]) == [2.0, 3.0]
    rows[1]["columns"]["cuflash"]["failed"] = "why"
    assert ratios(rows, "cuflash", ["a", "b"]) == [2.0]


def test_quantising_is_shared_with_the_copy_of_its_row() -> None:
    row: dict[str, Any] = {
        "columns": {
            "copy": {"ms": 1.0, "gb_s": 4000.0}, "16 bits": {"ms": 3.0},
            "quantise f8": {"ms": 1.0, "gb_s": 3000.0}, "whole f8": {"ms": 2.0},
            "quantise i8": {"failed": "why"}, "whole i8": {"ms": 2.0, "wrong": "why"},
        }
    }  # fmt: skip
    quantize.add_shares(row, ("f8", "i8"))
    assert row["of_copy"] == {"f8": 0.75}
    assert row["to_16_bits"] == {"f8": 1.5}


def test_steps_share_the_budget_and_one_that_fails_costs_itself() -> None:
    run_ = session()
    deadlines: dict[str, float] = {}

    def step(name: str) -> Any:
        def go() -> None:
            assert run_.deadline is not None
            deadlines[name] = run_.deadline - run_.started
            if name == "b":
                raise RuntimeError("why")

        return go

    everything.run_steps(
        run_, [(n, part, step(n)) for n, part in (("a", 1), ("b", 3), ("c", 4))], 80
    )
    assert deadlines == pytest.approx({"a": 10.0, "b": 40.0, "c": 80.0})
    assert run_.faults == ["b: why"]
    assert run_.results.data["skipped"] == ["b: failed: why"]
    everything.run_steps(run_, [("d", 1, step("d"))], 1e-9)
    assert "d: out of time" in run_.results.data["skipped"]


def test_a_whole_run_has_every_bench_and_says_what_it_leaves_out() -> None:
    run_ = session()
    names = [name for name, _, _ in everything.steps(run_, None)]
    assert names == [
        *("host", "forward", "backward", "fp8", "quantize", "memory", "io", "static", "compile")
    ]  # fmt: skip
    run_.place = "cuda"
    everything.steps(run_, None)
    for what in ("fa4: ", "forward: more than 262,144 keys: "):
        assert any(line.startswith(what) for line in run_.results.data["skipped"])


def test_columns_are_of_modules_that_exist() -> None:
    """Their options too, as far as they can be asked without a GPU."""
    specs = [
        *columns.forward("auto", "cuda", columns.PEERS).values(),
        *columns.forward("auto", "cpu", columns.CPU_PEERS).values(),
        *columns.backward("auto", columns.BACKWARD_PEERS).values(),
        *columns.fp8(columns.RECIPES, columns.FP8_PEERS).values(),
        *columns.quantize(columns.RECIPES).values(),
        *columns.CEILINGS.values(),
        columns.judge("cpu"),
    ]
    for spec in specs:
        module = importlib.import_module(spec.module)
        inspect.signature(module.versions).bind(**spec.options)
        if spec.module != "bench.peers.judge":
            inspect.signature(module.make).bind(None, None, None, None, **spec.options)
    assert host.PROBLEM.kv_len <= 64
