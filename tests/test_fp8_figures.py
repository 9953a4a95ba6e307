"""Figures of the 8-bit error: what they show, in files that are not empty."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.fp8 import PRESETS, figures
from cuflash.fp8.experiment import Shape, plan_random, run
from cuflash.fp8.records import Record
from cuflash.fp8.rotation import rotation_of
from cuflash.fp8.sweeps import PUBLISHED, SWEEPS

matplotlib = pytest.importorskip("matplotlib")

TINY = Shape(heads=1, keys=64, dim=16, rows=4)


def record(**fields: Any) -> Record:
    usual: dict[str, Any] = {
        "sweep": "", "recipe": "f8", "inputs": "paper", "setting": "", "x": None, "heads": 1,
        "rows": 4, "keys": 64, "dim": 16, "causal": False, "seed": 0, "rmse": 0.02,
        "relative_l2": 0.05, "max_error": 0.1, "cosine": 0.99, "rmse_unrounded": 0.02, "size": 0.4,
    }  # fmt: skip
    return Record(**(usual | fields))


def made_up(name: str) -> list[Record]:
    """Records as the sweep has them, with errors that grow with the setting."""
    sweep = SWEEPS[name]
    return [
        record(
            sweep=name, recipe=recipe, inputs=inputs, setting=setting.label, x=setting.x, seed=seed,
            rmse=0.01 * (1 + i + j) * (1 + 0.1 * seed), relative_l2=0.02 * (1 + i + j),
            rmse_unrounded=0.01 * (1 + i),
        )
        for i, recipe in enumerate(sweep.recipes)
        for j, setting in enumerate(sweep.settings)
        for inputs in sweep.distributions
        for seed in range(3)
    ]  # fmt: skip


def words_in(path: Path) -> list[str]:
    """The texts of an SVG figure, which matplotlib repeats as comments beside their outlines."""
    text = path.read_text(encoding="utf-8")
    return [word.strip() for word in re.findall(r"<!-- (.*?) -->", text, flags=re.DOTALL)]


def ink(path: Path) -> float:
    """Share of the pixels of a PNG figure that are not white."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    return float(np.mean(pixels.min(axis=-1) < 0.95))


def test_every_sweep_has_a_figure() -> None:
    assert set(figures.LINE_FIGURES) | {"ablation", "limits"} == set(SWEEPS)
    assert figures.missing_reason() == ""


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_drawn(name: str, tmp_path: Path) -> None:
    (path,) = figures.draw_all(made_up(name), tmp_path / "new", "svg")
    assert path == tmp_path / "new" / f"{name}.svg"
    words = words_in(path)
    legend = words[-len(SWEEPS[name].recipes) :]
    if name == "ablation":
        legend = words[-2:]
        assert legend == ["published (FlashAttention-3)", "here, median"]
        assert {f"{p.rmse:.1e}" for p in PUBLISHED.values()} <= set(words)
        assert "per tensor" in words
        return
    assert legend == list(SWEEPS[name].recipes)  # once, and nothing twice
    assert all(words.count(recipe) == 1 for recipe in legend)
    assert set(SWEEPS[name].distributions) <= set(words)
    if name == "limits":
        return
    figure = figures.LINE_FIGURES[name]
    assert figure.x_label in words
    unit = "unit of V" if figure.metric == "rmse" else "%"
    assert any(unit in word for word in words)
    for setting in SWEEPS[name].settings:
        assert setting.label in words


def test_real_records_as_pixels(tmp_path: Path) -> None:
    tasks = plan_random(TINY, [0, 1], SWEEPS["balance"])
    tasks += plan_random(TINY, [0, 1], None, ["fp16", "f8"], ["normal", "t3"])
    paths = figures.draw_all(list(run(tasks)), tmp_path)
    assert [path.name for path in paths] == ["balance.png", "errors.png"]
    for path in paths:
        assert 0.01 < ink(path) < 0.5


def test_layers_of_a_model(tmp_path: Path) -> None:
    records = [
        record(inputs=f"layer {n}", recipe=recipe, relative_l2=0.01 * (n + 1))
        for n in range(9)
        for recipe in ("fa3", "i8")
    ]
    path = tmp_path / "layers.svg"
    figures.draw_inputs(records, path)
    words = words_in(path)
    assert words[-2:] == ["fa3", "i8"]
    assert {"layer", "0", "8", "relative L2 error (%)"} <= set(words)
    assert any(word.startswith("Error by layer of a model") for word in words)


def test_many_inputs_share_a_panel(tmp_path: Path) -> None:
    records = [
        record(inputs=f"layer {n}", sweep="block", setting=setting, relative_l2=0.01 * n)
        for n in range(1, 8)
        for setting in ("64", "128")
    ]
    path = tmp_path / "block.svg"
    figures.draw_lines(records, path, figures.LINE_FIGURES["block"])
    assert "7 inputs" in words_in(path)
    figures.draw_lines(records[:6], path, figures.LINE_FIGURES["block"])
    assert {"layer 1", "layer 2", "layer 3"} <= set(words_in(path))


def test_the_ablation_on_other_inputs_is_drawn_by_inputs(tmp_path: Path) -> None:
    records = [record(sweep="ablation", inputs="normal"), record(sweep="ablation", inputs="t3")]
    (path,) = figures.draw_all(records, tmp_path, "svg")
    assert "published (FlashAttention-3)" not in words_in(path)
    with pytest.raises(ValueError, match="records: none is of the distribution 'paper'"):
        figures.draw_ablation(records, path)


def test_kurtosis() -> None:
    assert figures.kurtosis(np.array([1.0, -1.0, 1.0, -1.0])) == pytest.approx(1)
    # Five numbers, 0 but for one: fourth moment 0.8 * 0.2**4 + 0.2 * 0.8**4, variance 0.16.
    x = np.array([1, 0, 0, 0, 0], np.float16)
    assert figures.kurtosis(x) == pytest.approx((0.8 * 0.2**4 + 0.2 * 0.8**4) / 0.16**2)
    assert figures.kurtosis(x + 7) == pytest.approx(figures.kurtosis(x))
    normal = np.random.default_rng(0).standard_normal(200_000)
    assert figures.kurtosis(normal) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("form", figures.FORMATS)
def test_a_block_of_keys(form: str, tmp_path: Path) -> None:
    block = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    block[5, 7] = 20
    rotated = rotation_of(PRESETS["f8"], 64, 1).apply(block[None])[0]
    before, after = figures.kurtosis(block), figures.kurtosis(rotated)
    assert after < 5 < before
    path = tmp_path / f"keys.{form}"
    figures.draw_key_block(block, rotated, path, "paper")
    if form == "png":
        assert 0.01 < ink(path) < 0.5
        return
    words = words_in(path)
    assert f"before rotation: kurtosis {before:.2f}" in words
    assert f"after rotation: kurtosis {after:.2f}" in words
    assert words[-3:] == ["before rotation", "normal", "after rotation"]


@pytest.fixture
def canvas(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, as matplotlib has them."""
    found: list[Any] = []
    finish = figures._finish

    def kept(canvas: Any, *rest: Any) -> None:
        finish(canvas, *rest)
        found.append(canvas)

    monkeypatch.setattr(figures, "_finish", kept)
    return found


def test_lines_and_bands_are_the_quantiles_in_percent(canvas: list[Any], tmp_path: Path) -> None:
    records = [
        record(
            sweep="channel", recipe=recipe, inputs="chanK", setting=f"{x:g}", x=x, seed=seed,
            relative_l2=size * x * (1 + seed),
        )
        for recipe, size in (("a", 0.001), ("b", 0.002))
        for x in (30.0, 1.0, 3.0)
        for seed in range(11)
    ]  # fmt: skip
    figures.draw_lines(records, tmp_path / "a.png", figures.LINE_FIGURES["channel"])
    (panel,) = canvas[0].axes
    for line, band, size in zip(panel.lines, panel.collections, (0.1, 0.2), strict=True):
        np.testing.assert_allclose(line.get_xdata(), [1, 3, 30])  # in their order
        np.testing.assert_allclose(line.get_ydata(), size * 6 * np.array([1, 3, 30]))
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.min() == pytest.approx(size * 2)
        assert heights.max() == pytest.approx(size * 10 * 30)
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert panel.lines[0].get_color() != panel.lines[1].get_color()


def test_points_and_whiskers(canvas: list[Any], tmp_path: Path) -> None:
    records = [
        record(
            sweep="balance",
            inputs="normal",
            setting=setting,
            seed=seed,
            relative_l2=size + 0.01 * seed,
        )
        for setting, size in (("off", 0.1), ("on", 0.2))
        for seed in range(11)
    ]
    figures.draw_lines(records, tmp_path / "a.png", figures.LINE_FIGURES["balance"])
    (panel,) = canvas[0].axes
    ((points, _, (whiskers,)),) = panel.containers
    np.testing.assert_allclose(points.get_ydata(orig=False), [15, 25])
    ends = [sorted(segment[:, 1]) for segment in whiskers.get_segments()]
    np.testing.assert_allclose(ends, [[11, 19], [21, 29]])
    assert points.get_linestyle() == "None"
    assert panel.get_ylim()[0] == 0


def test_bars_of_the_ablation(canvas: list[Any], tmp_path: Path) -> None:
    records = [
        record(sweep="ablation", recipe=recipe, seed=seed, rmse_unrounded=size * (1 + seed))
        for recipe, size in (("fp16", 1e-4), ("f8", 1e-3), ("fa3", 2e-3))
        for seed in range(11)
    ]
    figures.draw_ablation(records, tmp_path / "a.png")
    (panel,) = canvas[0].axes
    published, ours = ([bar.get_height() for bar in bars] for bars in panel.containers)
    np.testing.assert_allclose(published, [1.9e-4, 9.1e-3])
    np.testing.assert_allclose(ours, [6e-4, 6e-3, 12e-3])
    (whiskers,) = panel.collections
    ends = [segment[:, 1] for segment in whiskers.get_segments()]
    np.testing.assert_allclose(ends, [[2e-4, 1e-3], [2e-3, 1e-2], [4e-3, 2e-2]])
    assert panel.get_yscale() == "log"


def test_more_lines_than_colours_differ(canvas: list[Any], tmp_path: Path) -> None:
    records = [record(inputs=f"layer {n}", recipe=f"r{i}") for n in range(2) for i in range(17)]
    figures.draw_inputs(records, tmp_path / "a.png")
    (panel,) = canvas[0].axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in panel.lines}
    assert len(looks) == 17


def test_nan_does_not_stop_a_figure(tmp_path: Path) -> None:
    records = [
        record(sweep="sink", inputs="sink", setting=f"{x:g}", x=x, relative_l2=value)
        for x, value in ((0.0, 0.1), (2.0, math.nan), (4.0, 0.2))
    ]
    (path,) = figures.draw_all(records, tmp_path)
    assert ink(path) > 0.005


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records: got none"):
        figures.draw_lines([], tmp_path / "a.png", figures.LINE_FIGURES["sink"])
    with pytest.raises(ValueError, match="records: got none"):
        figures.draw_inputs([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="format: got 'gif'; expected one of png, svg"):
        figures.draw_all([record()], tmp_path, "gif")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "need matplotlib" in figures.missing_reason()
