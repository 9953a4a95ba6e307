"""Tables and figures come from result files, and the README's agree with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_records import everything, forward, record

from bench import cli, plots, report, tables
from bench.results import ROOT, load

PLACES = "".join(f"<!-- bench {name} -->\n<!-- /bench -->\n\n" for name in tables.TABLES)


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# A title\n\n{PLACES}The end.\n")
    return path


def write(folder: Path, content: dict[str, Any], name: str = "run.json") -> Path:
    path = folder / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_the_readme_agrees_with_the_results() -> None:
    """Made again, each of its tables is the same; without a file there is none yet."""
    text = report.README.read_text(encoding="utf-8")
    places = report.blocks(text)
    assert {name for name, _, _ in places} <= set(tables.TABLES)
    assert places, "no place for a table"
    assert report.rewrite(text, ROOT) == text, "python -m bench report makes them again"
    for file in report.sources(text):
        assert file.startswith("bench/results/")
    for figure in re.findall(r"\]\((bench/results/\S+\.svg)\)", text):
        assert (ROOT / figure).is_file(), figure


@pytest.mark.parametrize(("compiling", "shown"), [(1.6, True), (0.05, False)])
def test_a_first_call_that_was_not_compiled_is_not_shown(compiling: float, shown: bool) -> None:
    """NVRTC may have a cache of its own."""
    rows = [
        {"arch": "sm_90a", "family": "sm90", "kernel": "k", "seconds": 1.5, "bytes": 9},
        {"kernel": "k", "uncached_s": 2.0, "compiling_s": compiling, "cached_s": 0.1},
    ]
    text = tables.render("compile", record(compile=rows))
    assert ("First call of a process" in text) == shown
    assert "| sm_90a | sm90 | 1 | 1.50 | 1.50 |" in text


def test_no_figure_lies_there_without_its_file() -> None:
    folder = ROOT / "bench" / "results"
    records = {path.stem for path in folder.glob("*.json")}
    for figure in folder.glob("*.svg"):
        assert any(figure.stem.startswith(f"{stem}-") for stem in records), figure


def test_results_name_no_folders_of_the_machine_that_made_them() -> None:
    a_folder = re.compile(r"(?<![\w./])/(?:[\w.-]+/)+")
    assert a_folder.search('"cache": "/a/home/of.x/y"')
    assert not a_folder.search(json.dumps(everything()))
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert not a_folder.search(path.read_text(encoding="utf-8")), path


def test_tables_are_written_between_their_marks(readme: Path) -> None:
    file = write(readme.parent, everything())
    status = cli.main(
        ["report", "--json", str(file), "--readme", str(readme), "--no-figures"]
    )  # fmt: skip
    assert status == 0
    text = readme.read_text()
    assert text.startswith("# A title\n\n<!-- bench forward: results/run.json -->\n")
    assert text.endswith("<!-- /bench -->\n\nThe end.\n")
    assert [(name, source) for name, source, _ in report.blocks(text)] == [
        (name, "results/run.json") for name in tables.TABLES
    ]
    assert "| dim | mask | seq 512 | seq 1,024 |" in text
    assert "**600** / 550 / 500 / 50 |" in text
    assert "cuflash to fa3: 1.09 in the geometric mean, 1.09 at least." in text
    assert "**900** / 700 / 800 |" in text
    assert "matmul float16 700 TFLOP/s; " in text
    assert "memory grows with seq to the power of 1.00, time 1.90." in text
    assert "| cuflash | 512 | 538 | 512 | +5% |" in text


def test_a_report_of_nothing_new_changes_nothing(readme: Path) -> None:
    file = write(readme.parent, everything())
    arguments = ["report", "--readme", str(readme), "--no-figures"]
    assert cli.main([*arguments, "--json", str(file)]) == 0
    once = readme.read_text()
    assert cli.main(arguments) == 0
    assert readme.read_text() == once
    assert report.rewrite(once, readme.parent) == once
    changed = once.replace("**600**", "**601**", 1)
    assert report.rewrite(changed, readme.parent) == once


def test_a_file_replaces_the_tables_whose_bench_it_has(readme: Path) -> None:
    arguments = ["report", "--readme", str(readme), "--no-figures", "--json"]
    assert cli.main([*arguments, str(write(readme.parent, everything()))]) == 0
    faster = write(readme.parent, record(forward=forward(0.5)), "new.json")
    assert cli.main([*arguments, str(faster)]) == 0
    sources = {name: file for name, file, _ in report.blocks(readme.read_text())}
    assert sources["forward"] == "results/new.json"
    assert sources["fp8"] == "results/run.json"
    assert "**1200** / 550" in readme.read_text()


def test_places_without_a_file_stay_empty(readme: Path) -> None:
    before = readme.read_text()
    assert cli.main(["report", "--readme", str(readme)]) == 0
    assert readme.read_text() == before
    dirty = before.replace(" -->\n<!-- /bench", " -->\nby hand\n<!-- /bench", 1)
    assert report.rewrite(dirty, readme.parent) == before


@pytest.mark.parametrize("ends", ["wrong", "failed"])
def test_columns_that_are_wrong_are_marked_and_not_the_best(ends: str) -> None:
    rows = forward()
    for row in rows:
        row["columns"]["fa3"]["ms"] /= 10
        row["columns"]["fa3"][ends] = "for a reason"
    text = tables.render("forward", record(forward=rows))
    assert "fa3" not in text, "it has no cell that counts"
    del rows[0]["columns"]["fa3"][ends]
    text = tables.render("forward", record(forward=rows))
    assert "~~550~~" in text
    assert "**550**" in text
    assert text.count("**600**") == len(rows) - 1


def test_what_is_wrong_with_a_readme_or_a_file_is_told(
    readme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = readme.parent.parent / "outside.json"
    outside.write_text(json.dumps(everything()))
    for arguments, said in (
        (["--json", str(outside)], "expected a file below"),
        (["--json", str(readme.parent / "none.json")], "none.json: No such file"),
    ):
        assert cli.main(["report", "--readme", str(readme), *arguments]) == 2
        assert said in capsys.readouterr().err
    readme.write_text("nothing here\n")
    assert cli.main(["report", "--readme", str(readme)]) == 2
    assert "no place for a table; expected <!-- bench NAME -->" in capsys.readouterr().err
    readme.write_text("<!-- bench speed: results/run.json -->\n<!-- /bench -->\n")
    write(readme.parent, everything())
    assert cli.main(["report", "--readme", str(readme)]) == 2
    assert "table: got 'speed'; expected one of forward" in capsys.readouterr().err


def test_figures_are_drawn_from_their_file_alone(readme: Path) -> None:
    pytest.importorskip("matplotlib")
    file = write(readme.parent, everything())
    assert cli.main(["report", "--json", str(file), "--readme", str(readme)]) == 0
    drawn = {path.name for path in file.parent.glob("*.svg")}
    figures = ("speed", "error", "backward", "fp8", "io", "growth")
    assert drawn == {f"run-{name}.svg" for name in figures}
    linked = re.findall(r"\]\((\S+\.svg)\)", readme.read_text())
    assert {Path(link).name for link in linked} == drawn
    speed = (file.parent / "run-speed.svg").read_text()
    words = re.findall(r"<!-- (.*?) -->", speed)
    for word in ("cuflash", "fa3", "dim 64, full", "dim 128, causal", "TFLOP/s", "16k"):
        assert word in words, word
    assert any("run.json" in word for word in words), "it says which file it is of"
    again = {path: path.read_bytes() for path in file.parent.glob("*.svg")}
    plots.draw_all(load(file), file)
    assert again == {path: path.read_bytes() for path in file.parent.glob("*.svg")}


def test_figures_can_be_read_on_white_and_on_dark_pages(readme: Path) -> None:
    """Contrast of every colour with both grounds; nothing is filled."""
    pytest.importorskip("matplotlib")

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((light(one), light(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for colour in (plots._GREY, *plots._COLOURS):
        for ground in ("#ffffff", "#0d1117"):
            assert contrast(colour, ground) >= 3.0, (colour, ground)
    file = write(readme.parent, everything())
    (path, *_) = plots.draw_all(load(file), file)
    assert not re.search(r"fill: ?#(fff|000)", path.read_text().lower())
