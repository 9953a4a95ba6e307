"""The gate: a kernel that became slower than its peer of the same file fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_records import forward, record, row

from bench import cli
from bench.compare import compare
from bench.shapes import Problem

PROBLEM = Problem(1, 8, 8, 1024, 1024, 64)


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    """The exit status of comparing two records."""

    def run(old: dict[str, Any], new: dict[str, Any], *more: str) -> int:
        files = []
        for name, content in (("old", old), ("new", new)):
            files.append(tmp_path / f"{name}.json")
            files[-1].write_text(json.dumps(content))
        return cli.main(["compare", *map(str, files), *more])

    return run


def one(**times: float | str) -> dict[str, Any]:
    return record(forward=[row(PROBLEM, times)])


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (0.8, 0), (1.029, 0), (1.035, 1), (2, 1)])
def test_a_loss_above_3_percent_fails(gate: Any, factor: float, status: int) -> None:
    assert gate(record(forward=forward()), record(forward=forward(factor))) == status


def test_ratios_count_and_not_times(gate: Any) -> None:
    assert gate(one(cuflash=1.0, fa3=1.1), one(cuflash=2.0, fa3=2.2)) == 0
    assert gate(one(cuflash=1.0, fa3=1.1), one(cuflash=1.0, fa3=1.0)) == 1


def test_a_mean_hides_a_problem_unless_each_is_asked_for(gate: Any) -> None:
    new = forward()
    slow = new[3]["columns"]["cuflash"]
    slow["ms"] *= 1.1
    assert gate(record(forward=forward()), record(forward=new)) == 0
    assert gate(record(forward=forward()), record(forward=new), "--each") == 1


def test_the_peer_can_be_chosen_and_else_is_the_first_of_both(gate: Any) -> None:
    old = one(**{"cuflash": 1.0, "fa3": 1.0, "torch-cudnn": 1.0})
    new = one(**{"cuflash": 1.0, "fa3": "failed", "torch-cudnn": 0.9})
    changes, lost = compare(old, new)
    assert [change.peer for change in changes] == ["torch-cudnn"]
    assert changes[0].ratio == pytest.approx(0.9)
    assert not lost
    assert gate(old, new) == 1
    assert gate(old, new, "--peer", "fa3") == 2


@pytest.mark.parametrize("ends", ["failed", "unsupported", "wrong"])
def test_what_was_right_and_is_not_any_more_is_lost(
    gate: Any, ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = one(cuflash=0.1, fa3=1.0)
    new["benches"]["forward"][0]["columns"]["cuflash"][ends] = "for a reason"
    assert gate(one(cuflash=1.0, fa3=1.0), new) == 1
    assert "LOST  forward cuflash: paper, float16" in capsys.readouterr().out


def test_8_bits_are_compared_too(gate: Any) -> None:
    def of(time: float) -> dict[str, Any]:
        return record(fp8=[row(PROBLEM, {"f8": time, "fa3": 1.0}, "8 bits", list="fp8")])

    assert gate(of(1.0), of(1.01)) == 0
    assert gate(of(1.0), of(1.05)) == 1


def test_nothing_to_compare_does_not_pass(gate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = record(forward=[row(Problem(1, 8, 8, 2048, 2048, 64), {"cuflash": 1.0, "fa3": 1.0})])
    assert gate(one(cuflash=1.0, fa3=1.0), other) == 2
    assert gate(one(cuflash=1.0), one(cuflash=1.0)) == 2
    assert "no problem that both have beside the same peer" in capsys.readouterr().err


def test_files_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (("{", "not JSON"), ("[]", "not a record"), ('{"format": 9}', "format 1")):
        (tmp_path / "a.json").write_text(text)
        assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
        error = capsys.readouterr().err
        assert "a.json" in error
        assert said in error
    assert cli.main(["compare", str(tmp_path / "none.json"), str(tmp_path / "a.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
