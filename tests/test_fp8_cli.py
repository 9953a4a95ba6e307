"""`cuflash fp8-error`: tables, files, figures, progress, and messages about wrong arguments."""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import cli_fp8
from cuflash.fp8 import figures
from cuflash.fp8.records import Record, read_csv, read_json, summarise
from cuflash.fp8.sweeps import LIMITS, PUBLISHED, SWEEPS
from cuflash.runtime import progress

Capture = pytest.CaptureFixture[str]
FIXTURE = Path(__file__).parent / "data" / "smollm2_qkv.npz"
SMALL = ("--seq", "96", "--dim", "16", "--heads", "1", "--rows", "6", "--seeds", "2")


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="cuflash")
    cli_fp8.add_parser(whole.add_subparsers(dest="name", required=True))
    return whole


def run(*arguments: str | Path) -> int:
    options = parser().parse_args(["fp8-error", *map(str, arguments)])
    status: int = options.command(options)
    return status


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def table(text: str, first: str) -> dict[str, list[str]]:
    """Cells of a table by the first one of its line; the head line begins with `first`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    body = []
    for line in lines[start:]:
        if not line:
            break
        body.append(cells(line))
    return {row[0]: row[1:] for row in body}


def test_recipes_on_distributions(tmp_path: Path, capsys: Capture) -> None:
    files = ("--csv", tmp_path / "a.csv", "--json", tmp_path / "a.json")
    chosen = ("--distribution", "normal,sink3", "--recipe", "fp16,f8,i8:rotation=none")
    assert run(*SMALL, *chosen, *files, "--causal", "--seed", "4") == 0
    out, err = capsys.readouterr()
    assert err == ""
    records = read_csv(tmp_path / "a.csv")
    assert read_json(tmp_path / "a.json") == records
    assert len(records) == 2 * 3 * 2
    assert {record.seed for record in records} == {4, 5}
    assert {(r.keys, r.dim, r.heads, r.rows, r.causal) for r in records} == {(96, 16, 1, 6, True)}
    assert "relative L2 error in %, median of 2 seeds" in out
    assert "keys 96, dim 16, heads 1, rows of each 6, causal" in out
    found = table(out, "recipe")
    assert found["recipe"] == ["normal", "sink3", "RMS"]
    medians = {(s.recipe, s.inputs): s.median for s in summarise(records)}
    for recipe in ("fp16", "f8", "i8:rotation=none"):
        shown = [100 * medians[recipe, name] for name in ("normal", "sink3")]
        shown.append(float(np.sqrt(np.mean(np.square(shown)))))
        assert found[recipe] == [f"{value:.3g}" for value in shown]


def test_everything_unless_told(capsys: Capture) -> None:
    assert run(*SMALL) == 0
    found = table(capsys.readouterr().out, "recipe")
    assert set(found) == {"recipe", "fp16", "per_tensor", "fa3", "f8", "i8", "f8+", "i8+"}
    assert found["recipe"][:3] == ["paper", "normal", "chanK"]


def test_the_ablation_stands_beside_the_published_numbers(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.csv"
    assert run("--sweep", "ablation", *SMALL, "--csv", path) == 0
    found = table(capsys.readouterr().out, "recipe")
    ours = {s.recipe: s for s in summarise(read_csv(path), "rmse_unrounded")}
    assert set(ours) == {*PUBLISHED, "f8", "i8"}
    for recipe, published in PUBLISHED.items():
        shown, here, low, high, ratio, _ = found[published.name]
        assert shown == f"{published.rmse:.1e}"
        assert (here, low, high) == tuple(
            f"{getattr(ours[recipe], name):.2e}" for name in ("median", "low", "high")
        )
        assert float(ratio) == pytest.approx(ours[recipe].median / published.rmse, abs=0.006)
    assert found["FP8 per tensor"][0] == "2.4e-02"
    assert found["i8"][0] == "-"


@pytest.mark.parametrize(
    ("worst", "status", "verdict"),
    [
        (1.0, 0, "all within their limits"),
        (1.01, 1, "beyond its limit: i8+ on t3, 3.23 % > 3.2 %"),
        (math.nan, 1, "beyond its limit: i8+ on t3, nan % > 3.2 %"),
    ],
)
def test_limits(
    worst: float, status: int, verdict: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(tasks: Any) -> list[Record]:
        assert {(t.shape.heads, t.shape.rows, t.shape.keys, t.shape.dim) for t in tasks} == {
            (8, 1024, 4096, 128)
        }
        return [
            Record(
                "limits", recipe, name, "", None, 8, 1024, 4096, 128, False, 0, 0.1,
                limit * (worst if (recipe, name) == ("i8+", "t3") else 0.9), 0.3, 0.9, None, 1.0,
            )
            for recipe, limits in LIMITS.items()
            for name, limit in limits.items()
        ]  # fmt: skip

    monkeypatch.setattr(cli_fp8.experiment, "run", measured)
    assert run("--sweep", "limits") == status
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == verdict
    lines = [cells(line) for line in out.splitlines()[2:-1]]
    assert [line[0] for line in lines] == ["recipe", "f8+", "at most", "i8+", "at most"]
    assert lines[2][1:] == [f"{100 * limit:.3g}" for limit in LIMITS["f8+"].values()]


def test_a_sweep_has_its_settings_as_columns(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.csv"
    arguments = ("--sweep", "balance", "--distribution", "chanK", "--recipe", "f8")
    assert run(*arguments, *SMALL, "--csv", path, "--metric", "max_error") == 0
    out = capsys.readouterr().out
    assert "balance: balancing of the channels of q and k; largest error" in out
    medians = [f"{s.median:.2e}" for s in summarise(read_csv(path), "max_error")]
    assert table(out, "inputs") == {"inputs": ["recipe", "off", "on"], "chanK": ["f8", *medians]}


def test_several_sweeps(capsys: Capture) -> None:
    assert run("--sweep", "sink,block", "--recipe", "f8", *SMALL) == 0
    sink, block = capsys.readouterr().out.split("\n\n")
    assert sink.startswith("sink: score of an attention sink")
    assert cells(sink.splitlines()[2])[2:] == ["0", "2", "4", "6", "8", "10", "12", "16"]
    assert block.startswith("block: ")


def test_all_sweeps_are_planned() -> None:
    options = parser().parse_args(["fp8-error", "--sweep", "all", "--distribution", "normal"])
    tasks = cli_fp8._tasks(options)
    assert list(dict.fromkeys(task.sweep for task in tasks)) == list(SWEEPS)
    given = parser().parse_args(["fp8-error", "--sweep", "all", "--npz", str(FIXTURE)])
    names = {task.sweep for task in cli_fp8._tasks(given)}
    assert names == {n for n, s in SWEEPS.items() if not s.about_inputs and not s.about_shapes}


def test_layers_of_a_file(tmp_path: Path, capsys: Capture) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"{n}_{i}": rng.standard_normal((2, 40, 16)) for n in "qkv" for i in range(15)}
    np.savez(tmp_path / "many.npz", **arrays)
    common = ("--rows", "4", "--seeds", "1", "--recipe", "f8,i8", "--causal")
    assert run("--npz", tmp_path / "many.npz", *common) == 0
    found = table(capsys.readouterr().out, "recipe")  # on its side, for it has many columns
    assert found["recipe"] == ["f8", "i8"]
    assert list(found)[1:] == [*(f"layer {i}" for i in range(15)), "RMS"]
    assert run("--npz", tmp_path / "many.npz", "--layers", "3,0", *common) == 0
    assert table(capsys.readouterr().out, "recipe")["recipe"] == ["layer 3", "layer 0", "RMS"]
    assert run("--npz", FIXTURE, "--sweep", "ablation", *common) == 0
    assert "published" not in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize("form", figures.FORMATS)
def test_figures(form: str, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--sweep", "channel", "--recipe", "f8", "--figures", tmp_path / "new")
    assert run(*arguments, *SMALL, "--format", form) == 0
    paths = [tmp_path / "new" / f"{name}.{form}" for name in ("channel", "keys")]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert capsys.readouterr().out.endswith("".join(f"drawn: {path}\n" for path in paths))


def test_what_is_named_twice_is_measured_once(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "errors.json"
    once = (*SMALL[:-1], "1")
    assert run(*once, "--recipe", "f8,f8", "--distribution", "normal,normal", "--json", file) == 0
    assert len(read_json(file)) == 1
    assert "seeds" not in capsys.readouterr().out


def test_the_ablation_in_another_metric(capsys: Capture) -> None:
    assert run("--sweep", "ablation", "--metric", "cosine", *SMALL) == 0
    assert "1 - cosine similarity" in capsys.readouterr().out


def test_limits_of_full_attention_are_not_those_of_causal() -> None:
    for more, expected in (((), True), (("--causal",), False)):
        tasks = cli_fp8._tasks(parser().parse_args(["fp8-error", "--sweep", "all", *more]))
        names = {task.sweep for task in tasks}
        assert ("limits" in names) == expected


def test_the_examples_of_the_help_parse(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["fp8-error", "--help"])
    text = capsys.readouterr().out
    _, _, examples = text.partition("examples:\n")
    lines = [line.split() for line in examples.splitlines() if line.strip()]
    assert len(lines) == 5
    for program, *arguments in lines:
        assert program == "cuflash"
        parser().parse_args(arguments)
    for name in SWEEPS:
        assert re.search(rf"^  {name} +\w", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sweep", "twist"), "argument --sweep: got 'twist'; expected of all, ablation"),
        (("--recipe", "f8,f9"), "argument --recipe: got 'f9'; expected one of per_tensor"),
        (("--recipe", "f8:sead=1"), "argument --recipe: got 'f8:sead=1'; expected after a colon"),
        (("--dim", "0"), "argument --dim: got '0'; expected a whole number of 1 or more"),
        (("--seq", "4k"), "argument --seq: got '4k'"),
        (("--heads", "-1"), "argument --heads"),
        (("--rows", "1.5"), "argument --rows: got '1.5'"),
        (("--seeds", "0"), "argument --seeds: got '0'"),
        (("--seed", "x"), "argument --seed: got 'x'; expected a whole number of 0 or more"),
        (("--metric", "l2"), "argument --metric: invalid choice: 'l2'"),
        (("--format", "gif"), "argument --format: invalid choice: 'gif'"),
    ],
)
def test_arguments_that_do_not_parse(
    arguments: tuple[str, ...], message: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--distribution", "norm"), "distribution: got 'norm'; expected one of paper"),
        (
            ("--sweep", "sink", "--distribution", "normal"),
            "distribution: got normal; expected none",
        ),
        (("--sweep", "length", "--seq", "64"), "--seq: is settled by the sweep 'length'"),
        (("--sweep", "sink,dim", "--dim", "64"), "--dim: is settled by the sweep 'dim'"),
        (("--sweep", "limits", "--rows", "8"), "--rows: is settled by the sweep 'limits'"),
        (("--sweep", "limits", "--causal"), "--causal: the sweep 'limits' is about full"),
        (("--layers", "3"), "--layers: needs --npz"),
        (("--npz", FIXTURE, "--dim", "64"), "--dim: is settled by the file of --npz"),
        (("--npz", FIXTURE, "--seq", "64"), "--seq: is settled"),
        (("--npz", FIXTURE, "--heads", "1"), "--heads: is settled"),
        (("--npz", FIXTURE, "--distribution", "t3"), "--distribution: is settled"),
        (
            ("--npz", FIXTURE, "--rows", "2", "--seeds", "1", "--metric", "rmse_unrounded"),
            "--metric: got 'rmse_unrounded', but these inputs are float16",
        ),
        (("--npz", FIXTURE, "--layers", "27,28"), "--layers: got '28'; .*npz has 27"),
        (("--npz", FIXTURE, "--sweep", "sink"), "sweep: got 'sink', which brings its own inputs"),
        (("--csv", "no/such/folder/a.csv"), "--csv: got no/such/folder/a.csv; there is no folder"),
        (("--json", "no/such/folder/a.json"), "--json: got no/such/folder/a.json"),
        (("--figures", FIXTURE), "--figures: got .*, which is no folder"),
        (("--figures", FIXTURE / "below"), "--figures: got .*, which is no folder"),
        (("--json", FIXTURE.parent), "--json: got .*, which is a folder; expected a file"),
        (("--distribution", "chanK", "--dim", "2"), "dim: got 2; four outlier channels"),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_missing_files_and_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        run("--npz", tmp_path / "none.npz")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="--figures: figures need matplotlib"):
        run("--figures", tmp_path)


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0)
    with progress.bar(4) as step:
        for words in ("one", "two", "three", "x" * 500):
            step(words)
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert [re.findall(r"\d/\d", line)[0] for line in lines[1:-1]] == [f"{i}/4" for i in range(5)]
    assert re.fullmatch(r"\[######\.{18}\] 1/4, \d+ s left  one", lines[2])
    assert lines[-2].startswith("[" + "#" * 24 + "]")
    assert len(lines[-2]) < 200


def test_the_bar_elsewhere(capsys: Capture) -> None:
    with progress.bar(2) as step:
        step("one")
    assert capsys.readouterr().err == ""


def test_a_run_shows_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0)
    assert run(*SMALL, "--recipe", "fp16", "--distribution", "t3") == 0
    assert "2/2" in terminal.getvalue()
    assert "t3 fp16" in terminal.getvalue()


def test_a_report_without_seeds_says_so() -> None:
    one = Record(
        "", "f8", "normal", "", None, 1, 2, 3, 4, False, 0, 0.1, 0.05, 0.3, 0.75, None, 1.0
    )  # fmt: skip
    assert "median" not in cli_fp8.report([one])
    assert table(cli_fp8.report([one], "cosine"), "recipe")["f8"] == ["2.5e-01"]
