"""The rows of a head that statistics are of, and what it costs that they are not all."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash.fp8 import quantize, quantize_fp8
from cuflash.fp8.sample import FEWEST, RUN, runs, sampled, spacing

LONG = [4096, 4097, 6000, 8191, 8192, 40_000, 1 << 20]


@pytest.mark.parametrize("length", [0, 1, RUN - 1, RUN, RUN + 1, 2047, 2048, 4095])
def test_a_short_head_is_taken_whole(length: int) -> None:
    assert spacing(length) == 1
    np.testing.assert_array_equal(sampled(length), np.arange(length))


@pytest.mark.parametrize("length", LONG)
def test_of_a_long_head_there_is_a_run_of_each_group(length: int) -> None:
    rows, every = sampled(length), spacing(length)
    assert every & (every - 1) == 0
    assert FEWEST <= length // every < 2 * FEWEST
    assert rows[-1] < length
    first = rows[::RUN]
    np.testing.assert_array_equal(first % RUN, 0)
    whole = length // (every * RUN)
    np.testing.assert_array_equal(first[:whole] // (every * RUN), np.arange(whole))
    np.testing.assert_array_equal(rows[: whole * RUN].reshape(-1, RUN) - first[:whole, None],
                                  np.tile(np.arange(RUN), (whole, 1)))  # fmt: skip
    assert whole <= runs(length) <= whole + 1
    assert len(np.unique(first[:whole] // RUN % every)) > min(every, whole) // 3, "by lot"


@pytest.mark.parametrize("length", LONG)
def test_channels_that_turn_are_met_at_all_phases(length: int) -> None:
    """As rotary embeddings have them, at whichever speed: of so many, none resonates."""
    all_rows, rows = np.arange(length), sampled(length)
    speeds = 2 * np.pi / RUN / np.concatenate([
        np.arange(1, 9) ** -1.0, spacing(length) / np.arange(1, 9), np.geomspace(0.3, length / 32),
    ])  # fmt: skip
    for speed in speeds:
        exact, found = (np.exp(1j * speed * x).mean() for x in (all_rows, rows))
        assert abs(found - exact) < 0.3, 2 * np.pi / speed


def test_rounding_to_8_bits_hides_that_not_all_rows_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of keys with a mean, channels of several sizes, and some far larger rows."""
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 1, 2, 10_000, 64))
    k = (k + 4 * rng.standard_normal(64)) * np.exp(rng.standard_normal(64))
    k[:, :, rng.integers(0, 10_000, 20)] *= 20
    arrays = tuple(x.astype(np.float32) for x in (q, k, v))

    def error() -> float:
        """Of raw scores, whose mean over the keys of a row softmax ignores."""
        tensors = quantize_fp8(*arrays, "f8")
        mean = tensors.k.mean
        assert mean is not None
        rows = slice(0, 10_000, 50)
        found = tensors.q.dequantize()[:, :, rows] @ (tensors.k.dequantize() - mean).swapaxes(2, 3)
        exact = arrays[0][:, :, rows] @ (arrays[1] - mean).swapaxes(2, 3)
        return float(np.linalg.norm(found - exact))

    of_sample = error()
    monkeypatch.setattr(quantize, "spacing", lambda length: 1)
    of_all = error()
    assert of_sample != of_all
    assert of_sample < 1.01 * of_all
