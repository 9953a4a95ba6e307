"""The training example: its gradients by differences, and a short run of it with its check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_tiny
from comparison import Array
from tiny_transformer import (
    Config,
    dense_attention,
    initial_parameters,
    loss_and_gradients,
    one_hot,
)
from train_tiny import Adam, Comparison, by_cuflash, by_standard, main, rounded, text_bytes

import cuflash
from cuflash import oracle

ROOT = Path(__file__).parent.parent
SMALL = Config(layers=2, width=12, heads=4, kv_heads=2, head_dim=5, hidden=10, context=9)


def test_a_short_run_learns_and_agrees_with_standard_attention() -> None:
    """From the command line, as its docstring says."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Two threads of a matrix product wait for each other; on busy cores one is faster.
    arguments = ["--steps", "20", "--check", "--device", "cpu"]
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_tiny.py", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    first, last = (float(line.split()[-1]) for line in lines[:2])
    assert (lines[0].split()[1], lines[1].split()[1]) == ("1", "20")
    assert last < first - 1.5
    assert "agrees" in lines[-1]


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.01), ("float16", 1.1)])
def test_the_check_notices_a_wrong_gradient(
    dtype: str, factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of k alone, and a little, which training hides well."""
    both = cuflash.attention_vjp

    def off(*args: Any, **options: Any) -> Any:
        out, vjp = both(*args, **options)

        def wrong(dout: Array) -> Any:
            dq, dk, dv = vjp(dout)
            return dq, dk * dk.dtype.type(factor), dv

        return out, wrong

    small = Config(layers=1, width=24, heads=2, kv_heads=1, head_dim=12, hidden=32, context=32)
    monkeypatch.setattr(train_tiny, "Config", lambda layers: small)
    arguments = ["--steps", "6", "--check", "--device", "cpu", "--dtype", dtype]
    assert main(arguments) == 0
    assert "agrees" in capsys.readouterr().out
    monkeypatch.setattr(cuflash, "attention_vjp", off)
    assert main(arguments) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("attention", ["cuflash", "standard"])
def test_the_gradients_are_the_slopes_of_the_loss(attention: str) -> None:
    """In float64, by each parameter along a random direction."""
    attend = by_cuflash("auto") if attention == "cuflash" else by_standard(np)
    rng = np.random.default_rng(0)
    parameters = initial_parameters(SMALL, rng, np.float64)
    tokens = rng.integers(0, 256, (3, 8))  # shorter than the context
    _, gradients = loss_and_gradients(parameters, tokens, SMALL, attend, np)
    assert gradients.keys() == parameters.keys()
    for name, array in parameters.items():
        assert gradients[name].shape == array.shape
        direction = rng.standard_normal(array.shape)

        def loss(
            distance: float, name: str = name, array: Array = array, along: Array = direction
        ) -> float:
            moved = parameters | {name: array + distance * along}
            return float(loss_and_gradients(moved, tokens, SMALL, attend, np)[0])

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("attention", ["cuflash", "standard"])
def test_both_attentions_are_attention(attention: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, heads, 6)) for heads in (4, 2, 2))
    attend = by_cuflash("auto") if attention == "cuflash" else by_standard(np)
    out, vjp = attend(q, k, v)
    dout = rng.standard_normal(q.shape)
    expected, _ = oracle.attention(q, k, v, causal=True, layout="bshd")
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    exact = oracle.gradients(dout, q, k, v, causal=True, layout="bshd")
    for got, want in zip(vjp(dout), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_standard_attention_computes_in_the_precision_of_its_inputs() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 4)).astype(np.float32)
    out, vjp = dense_attention(q, q, q, np)
    assert {array.dtype for array in (out, *vjp(out))} == {np.dtype(np.float32)}


def test_rounded_attention_is_given_and_gives_16_bits() -> None:
    seen = []

    def attend(*arrays: Array) -> Any:
        seen.extend(array.dtype for array in arrays)
        return arrays[0] / 3, lambda dout: (seen.append(dout.dtype), dout / 7)[1:] * 3

    q = np.full((1, 2, 1, 4), 1 / 3, np.float32)
    out, vjp = rounded(attend, np.float16)(q, q, q)
    gradients = vjp(q)
    assert set(seen) == {np.dtype(np.float16)}
    assert all(a.dtype == np.float32 for a in (out, *gradients))
    assert np.array_equal(out, (q.astype(np.float16) / 3).astype(np.float32))


def test_one_hot_and_adam() -> None:
    assert np.array_equal(one_hot(np.array([3, 0]), np.float32, np).argmax(-1), [3, 0])
    parameters = {"w": np.array([1.0, -2.0])}
    optimizer = Adam(parameters, np)
    optimizer.step({"w": np.array([0.1, -30.0])}, 0.01)
    np.testing.assert_allclose(parameters["w"], [0.99, -1.99], rtol=1e-6)


def test_losses_that_rounding_does_not_explain_differ() -> None:
    exact = np.array([3.0, 2.0])
    assert Comparison(exact + 3e-7, exact + 1e-7, exact).agrees
    assert not Comparison(exact + 6e-7, exact + 1e-7, exact).agrees
    assert "DIFFERS" in str(Comparison(exact + 1e-3, exact + 1e-7, exact))


def test_the_text_is_long_and_what_is_too_short_is_refused(tmp_path: Path) -> None:
    assert len(text_bytes(None)) > 100_000
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    with pytest.raises(ValueError, match="the text has 9 bytes; expected more than 128"):
        main(["--text", str(short), "--device", "cpu", "--steps", "1"])
    assert main(["--text", str(tmp_path / "none"), "--device", "cpu"]) == 2


def test_the_loss_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    train_tiny.plot(path, {"cuflash": np.array([3.0, 2.0]), "standard": np.array([3.0, 2.1])})
    assert path.read_bytes().startswith(b"\x89PNG")
