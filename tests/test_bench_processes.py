"""The bench's processes: one that fails, hangs, dies or is wrong costs its own column."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import columns as columns_of
from bench import processes, race
from bench.columns import JUDGE, judge
from bench.processes import Failed, Process, Spec, Team, tidy
from bench.race import Pace
from bench.shapes import Problem

PROBLEM = Problem(2, 4, 2, 40, 48, 16, "float32", causal=True)
PACE = Pace(rounds=3, settle_ms=0.1, window_ms=0.5)


def spec(does: str) -> Spec:
    return Spec("bench_fakes", "cpu", {"does": does})


def measure(*ways: str, pace: Pace = PACE) -> tuple[dict[str, dict[str, object]], Team]:
    specs = {way: spec(way) for way in ways}
    with Team({**specs, JUDGE: judge("cpu")}) as team:
        judged = dict.fromkeys(ways, "float32")
        row = race.run(PROBLEM, ways, team, pace, judged=judged)
    return row["columns"], team


@pytest.fixture(scope="module")
def columns() -> Iterator[dict[str, dict[str, object]]]:
    """One race of most ways to fail, beside two that do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "WINDOW_S", 1.0)
        yield measure(
            "attends", "prints", "refuses", "raises", "is wrong in one row", "leaves NaN", "dies",
            "dies when timed", "hangs when timed", "is not installed", "sees other inputs",
        )[0]  # fmt: skip


@pytest.mark.parametrize("way", ["attends", "prints"])
def test_who_works_is_timed_and_right(way: str, columns: dict[str, dict[str, object]]) -> None:
    entry = columns[way]
    assert race.is_ranked(entry)
    assert isinstance(entry["ms"], float)
    assert 0 < entry["ms"] < 1000
    assert entry["rounds"] == PACE.rounds
    assert isinstance(entry["error"], float)
    assert 0 < entry["error"] < 1e-6
    assert entry["note"] == way


@pytest.mark.parametrize(
    ("way", "key", "said"),
    [
        ("refuses", "unsupported", "takes no such problem"),
        ("raises", "failed", "RuntimeError: first line"),
        ("dies", "failed", "ended with status 3: terminate called"),
        ("dies when timed", "failed", "ended with status 4"),
        ("hangs when timed", "failed", "no answer within"),
        ("is not installed", "failed", "ImportError: No module named 'fake'"),
    ],
)
def test_who_fails_says_why_and_is_not_ranked(
    way: str, key: str, said: str, columns: dict[str, dict[str, object]]
) -> None:
    entry = columns[way]
    assert not race.is_ranked(entry)
    assert str(entry[key]).startswith(said)
    assert "ms" not in entry


@pytest.mark.parametrize("way", ["is wrong in one row", "leaves NaN"])
def test_who_is_wrong_is_timed_and_not_ranked(
    way: str, columns: dict[str, dict[str, object]]
) -> None:
    entry = columns[way]
    assert "ms" in entry
    assert not race.is_ranked(entry)
    assert "relative L2 error" in str(entry["wrong"])


def test_results_of_other_inputs_are_wrong(columns: dict[str, dict[str, object]]) -> None:
    """Here the result differs too; the next test has inputs that do, and nothing else."""
    assert not race.is_ranked(columns["sees other inputs"])


def test_inputs_that_are_not_those_of_the_judge_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Process.ask

    def with_another_seed(
        self: Process, operation: str, timeout: float, **fields: object
    ) -> object:
        if operation == "exact":
            fields["seed"] = 2
        return ask(self, operation, timeout, **fields)

    monkeypatch.setattr(Process, "ask", with_another_seed)
    found, _ = measure("attends")
    assert found["attends"]["wrong"] == "its inputs are not those of the judge"


def test_nothing_is_right_without_a_judge() -> None:
    with Team({"attends": spec("attends"), JUDGE: spec("is not installed")}) as team:
        row = race.run(PROBLEM, ["attends"], team, PACE, judged={"attends": "float32"})
    assert "not judged: ImportError" in row["columns"]["attends"]["wrong"]


def test_modules_of_another_source_tree_come_first(tmp_path: Path) -> None:
    (tmp_path / "bench_fakes.py").write_text("def versions(does): return {'fake': '0.9'}\n")
    there = Process(replace(spec("attends"), tree=str(tmp_path)))
    there.greet(60.0)
    there.end()
    assert there.versions == {"fake": "0.9"}
    with Team({"here": spec("attends"), "there": replace(spec("attends"), tree="/")}) as team:
        team.present(["here", "there"])
        assert team.versions() == {"fake": "1.0"}


def test_ours_stand_beside_those_of_another_source_tree() -> None:
    specs = columns_of.backward("auto", ["torch-flash", "sm80"])
    found = columns_of.against(specs, "/elsewhere")
    assert list(found) == ["cuflash against", "sm80 against"]
    for name, one in found.items():
        assert one == replace(specs[name.removesuffix(" against")], tree="/elsewhere")


def test_a_process_that_starts_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_S", 1.0)
    begin = time.monotonic()
    with Team({"slow": spec("starts for ever")}) as team:
        assert team.present(["slow"]) == {}
    assert "no answer within 1 s" in team.absent["slow"]
    assert time.monotonic() - begin < 30


def test_who_ends_is_started_again_until_it_has_ended_too_often() -> None:
    specs = {"dies": spec("dies"), "attends": spec("attends"), JUDGE: judge("cpu")}
    reasons = []
    with Team(specs) as team:
        for _ in range(5):
            row = race.run(PROBLEM, ["dies", "attends"], team, PACE, judged={"attends": "float32"})
            reasons.append(row["columns"]["dies"]["failed"])
            assert race.is_ranked(row["columns"]["attends"])
    assert all(reason.startswith("ended with status 3") for reason in reasons[:3])
    assert reasons[3].startswith("ended 3 times, at last: ended with status 3")
    assert reasons[3] == reasons[4]


def test_who_lacks_patience_is_asked_less() -> None:
    found, _ = measure("attends", pace=Pace(rounds=5, settle_ms=1, window_ms=20, patience_s=0.001))
    assert found["attends"]["rounds"] == 1


def test_requests_that_are_none_are_refused_and_the_process_goes_on() -> None:
    process = Process(spec("attends"))
    process.greet(60.0)
    assert process.versions == {"fake": "1.0"}
    with pytest.raises(Failed, match="op: got 'nothing'; expected one of prepare"):
        process.ask("nothing", 60.0)
    with pytest.raises(Failed, match="nothing is prepared"):
        process.ask("window", 60.0, settle_ms=1, window_ms=1, flush=False)
    assert process.ask("call", 60.0, name="answer", arguments={"what": 21}) == 42
    process.end()


def test_the_order_of_turns_is_random_and_everyone_has_as_many() -> None:
    order: list[str] = []
    running = dict.fromkeys("abcd")

    def one(name: str) -> float:
        order.append(name)
        return 1.0

    column: dict[str, dict[str, object]] = {name: {} for name in running}
    with Team({}) as team:
        times = race.take_turns(
            running,
            one,
            Pace(rounds=20),
            random.Random(3),
            team,
            column,  # type: ignore[arg-type]
        )
    assert all(len(found) == 20 for found in times.values())
    rounds = {tuple(order[i : i + 4]) for i in range(0, 80, 4)}
    assert all(sorted(turn) == list("abcd") for turn in rounds)
    assert len(rounds) > 5


def test_in_a_contest_the_fastest_have_more_rounds() -> None:
    running = dict.fromkeys("abcd")
    speeds = {"a": 1.0, "b": 1.1, "c": 1.3, "d": 9.0}
    column: dict[str, dict[str, object]] = {name: {} for name in running}
    with Team({}) as team:
        times = race.take_turns(
            running,
            speeds.__getitem__,
            Pace(rounds=5),
            random.Random(3),
            team,
            column,  # type: ignore[arg-type]
            contest=True,
        )
    assert {name: len(found) for name, found in times.items()} == {"a": 10, "b": 10, "c": 3, "d": 3}


def test_in_a_contest_of_none_nobody_is_asked() -> None:
    with Team({}) as team:
        assert race.take_turns({}, len, Pace(), random.Random(3), team, {}, contest=True) == {}


def test_reasons_have_one_line_and_no_folders() -> None:
    assert tidy("\n  OSError: /home/me/x/lib.so.1: bad\nmore") == "OSError: lib.so.1: bad"
    assert tidy("see https://example.org/a/b") == "see https://example.org/a/b"
    assert tidy("") == "no reason given"
    assert len(tidy("x" * 1000)) == 240
