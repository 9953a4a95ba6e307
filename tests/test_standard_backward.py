"""The backward pass of the standard family, its steps on NumPy arrays, against the oracle."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backward_cases import host_backward, run_on_host
from gpu_cases import CHUNKED, OPTIONS, Problem, problems

import cuflash
from cuflash import ArrayInfo, dispatch
from cuflash.families.backward import standard

FAMILY = "standard"
LENS = {"q_lens": [70, 0, 33, 1], "kv_lens": [90, 41, 0, 90]}


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_agrees_with_the_oracle(problem: Problem) -> None:
    backward = host_backward(problem)
    backward.assert_right(run_on_host(FAMILY, backward))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["list", "uint8"])
def test_lengths(options: str, kind: str) -> None:
    """What lies past them is NaN, in `dout`, `out` and LSE too."""
    backward = host_backward(Problem(batch=4, options=options), **LENS)
    given = {name: n if kind == "list" else np.array(n, kind) for name, n in LENS.items()}
    found = run_on_host(FAMILY, backward, **given)
    backward.assert_right(found, **LENS)
    for b in range(4):
        assert not found[0][b, :, LENS["q_lens"][b] :].any()
        assert not found[1][b, :, LENS["kv_lens"][b] :].any()
        assert not found[2][b, :, LENS["kv_lens"][b] :].any()


@pytest.mark.parametrize("options", ["causal", "softcap"])
def test_tails_of_every_length(options: str) -> None:
    for n in range(1, 131):
        alone = Problem(
            batch=1, heads=1, kv_heads=1, q_len=n, kv_len=n, dim=8, dim_v=8, options=options
        )
        backward = host_backward(alone)
        backward.assert_right(run_on_host(FAMILY, backward))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_single_key_passes_dout_on(dtype: str) -> None:
    backward = host_backward(Problem(dtype, q_len=1, kv_len=1, heads=2))
    found = run_on_host(FAMILY, backward)
    assert np.array_equal(found[2], backward.dout)
    backward.assert_right(found)


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5)], ids=str)
def test_no_keys_or_no_rows(lengths: tuple[int, int]) -> None:
    """The second is what a call without rows never prepares; it would be right all the same."""
    backward = host_backward(Problem(q_len=lengths[0], kv_len=lengths[1]))
    assert not any(gradient.any() for gradient in run_on_host(FAMILY, backward))


# --- chunks -------------------------------------------------------------------------------------


@pytest.fixture
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A workspace so small that problems take several chunks; they are counted in the list."""
    monkeypatch.setattr(standard, "_WORKSPACE", 400_000)
    chunks: list[Any] = []
    add_rows = standard._Heads.add_rows

    def counted(self: Any, rows: slice) -> None:
        chunks.append((self.entries, self.heads, rows))
        add_rows(self, rows)

    monkeypatch.setattr(standard._Heads, "add_rows", counted)
    dispatch._choose.cache_clear()
    yield chunks
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("problem", CHUNKED, ids=str)
@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
def test_chunks_make_no_difference(
    problem: Problem, with_lengths: bool, several_chunks: list[Any]
) -> None:
    lens: dict[str, Any] = {}
    if with_lengths:
        lens = {
            "q_lens": [max(problem.q_len - b, 0) for b in range(problem.batch)],
            "kv_lens": [max(problem.kv_len - 3 * b, 0) for b in range(problem.batch)],
        }
        problem = Problem(**(vars(problem) | {"storage": {}}))
    backward = host_backward(problem, **lens)
    found = run_on_host(FAMILY, backward, **lens)
    assert len(several_chunks) > 1
    backward.assert_right(found, **lens)


def test_long_causal_problems_leave_out_what_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of rows, of which each is done with the keys that it sees."""
    monkeypatch.setattr(standard, "_LONG", 64)
    dispatch._choose.cache_clear()
    q = ArrayInfo((1, 2, 64, 8))
    plan = cuflash.explain(q, q, q, causal=True, device="8.0", kernel=FAMILY, backward=True)
    assert plan.tiling.q_rows == 64 // standard._BLOCKS
    backward = host_backward(Problem(q_len=64, kv_len=90, options="left window"))
    backward.assert_right(run_on_host(FAMILY, backward))
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("options", ["full", "causal", "softcap"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_workspace_is_what_the_plan_says(
    options: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard, "_WORKSPACE", 8 << 20)
    dispatch._choose.cache_clear()
    problem = Problem(dtype, batch=1, q_len=1000, kv_len=900, options=options)
    backward = host_backward(problem)
    q, k = (ArrayInfo((1, heads, n, 64), dtype) for heads, n in ((4, 1000), (2, 900)))
    plan = cuflash.explain(q, k, k, **OPTIONS[options], device="8.0", kernel=FAMILY, backward=True)
    tracemalloc.start()
    run_on_host(FAMILY, backward)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    dispatch._choose.cache_clear()
    workspace = plan.tiling.workspace
    assert 1.5 * workspace < 4 * 1000 * 900 * 4, "the scores would not fit"
    assert workspace <= 8 << 20
    assert peak <= 1.1 * workspace, f"{peak / 1e6:.3g} MB, planned {workspace / 1e6:.3g} MB"


# --- bfloat16 without arithmetic on it ------------------------------------------------------------


def test_rounding_to_bfloat16_is_that_of_ml_dtypes() -> None:
    """To nearest, ties to even, for every upper half of a float32 with lower halves around ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).view(np.float32)
    heads = object.__new__(standard._Heads)
    heads.xp = np
    got = np.empty(values.shape, ml_dtypes.bfloat16)
    heads._store(got, values)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    same = got.view(np.uint16) == expected.view(np.uint16)
    assert (same | np.isnan(values)).all()
    assert np.array_equal(np.isnan(got.astype(np.float32)), np.isnan(values))
    back = heads._float32(got)
    assert np.array_equal(back, got.astype(np.float32), equal_nan=True)
