"""The kernels of the sm80 backward pass, their own text run on the host, against the oracle."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from attention_cases import Case, NumpyBackend, load_cases, takes_gradients
from backward_cases import host_backward
from backward_trials import judge
from comparison import Array
from emulated_gpu import emulated_backward, host_code, needs_cpp, run_emulated
from gpu_cases import Problem

import cuflash
from cuflash.families.backward import sm80
from cuflash.runtime.device import named

pytestmark = needs_cpp
REFUSED = ("case-08", "case-27")  # a mask; elements apart in the last axis

# Of each tile, with each form of the loop and each kind of tail somewhere among them.
PROBLEMS = [
    ("9.0", Problem(heads=2, kv_heads=1, q_len=130, kv_len=150, options="causal", batch=1)),
    ("9.0", Problem("bfloat16", heads=3, kv_heads=1, q_len=70, kv_len=200, dim=128, dim_v=128,
                    options="top-left", batch=1)),
    ("8.0", Problem(q_len=200, kv_len=70, dim=80, dim_v=80, options="causal", batch=1)),
    ("8.6", Problem("bfloat16", heads=1, kv_heads=1, q_len=65, kv_len=129, dim=96, dim_v=96,
                    options="window", batch=1)),
    ("8.6", Problem(heads=1, kv_heads=1, q_len=129, kv_len=65, dim=128, dim_v=64, batch=1,
                    layout="bshd", options="capped causal")),
    ("8.6", Problem("bfloat16", heads=2, kv_heads=1, dim=192, dim_v=192, batch=1, layout="bshd")),
    ("8.6", Problem(heads=1, kv_heads=1, dim=256, dim_v=256, batch=1, options="left window")),
    ("9.0", Problem(heads=1, kv_heads=1, dim=192, dim_v=96, batch=1, options="negative scale")),
    ("9.0", Problem("bfloat16", heads=1, kv_heads=1, dim=256, dim_v=32, batch=1,
                    options="right window")),
    ("9.0", Problem(heads=1, kv_heads=1, dim=61, dim_v=61, batch=1, options="softcap",
                    storage={"q": "offset", "out": "offset"})),
    ("9.0", Problem("bfloat16", heads=1, kv_heads=1, q_len=1, kv_len=1, dim=8, dim_v=1, batch=1)),
    ("8.0", Problem(heads=1, kv_heads=1, q_len=64, kv_len=64, dim=32, dim_v=32, batch=1,
                    options="zero scale")),
    ("9.0", Problem(heads=1, kv_heads=1, q_len=320, kv_len=330, dim=32, dim_v=32, batch=1,
                    options="wide window")),
]  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize(("device", "problem"), PROBLEMS, ids=str)
def test_agrees_with_the_oracle(
    device: str, problem: Problem, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = host_backward(problem)
    backward.assert_right(run_emulated(monkeypatch, backward, device, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("options", ["full", "causal", "top-left", "window"])
def test_lengths(options: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies past them is NaN, in `dout`, `out` and LSE too."""
    lens = {"q_lens": [70, 0, 33, 1], "kv_lens": [90, 41, 0, 90]}
    backward = host_backward(Problem(batch=4, heads=2, kv_heads=1, options=options), **lens)
    found = run_emulated(monkeypatch, backward, deterministic=deterministic, **lens)
    backward.assert_right(found, **lens)


@pytest.mark.parametrize("options", ["full", "causal", "top-left", "window", "capped causal"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "lens"),
    [(97, 129, {}), (97, 33, {}), (33, 97, {"q_lens": [33, 20], "kv_lens": [70, 97]})],
    ids=str,
)
def test_turns(
    q_len: int, kv_len: int, lens: dict[str, Any], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tiles of 32 x 32, in an entry whose order of keys falls and in one whose order rises."""
    problem = Problem(batch=2, heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, dim=200, dim_v=200,
                      options=options)  # fmt: skip
    backward = host_backward(problem, **lens)
    found = run_emulated(monkeypatch, backward, "8.6", deterministic=True, **lens)
    backward.assert_right(found, **lens)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
def test_no_key_at_all(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = host_backward(Problem(batch=1, kv_len=0))
    dq, dk, dv = run_emulated(monkeypatch, backward, deterministic=deterministic)
    assert not dq.any()
    assert dk.size == dv.size == 0


CASES = [
    pytest.param(case, id=case["id"])
    for case in load_cases()[0]
    if takes_gradients(case) and "numpy" in case["backends"] and case["id"][:7] not in REFUSED
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("case", CASES)
def test_cases_that_broke_other_libraries(
    case: Case, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emulated(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, **options: Any
    ) -> Any:
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        options["deterministic"] = deterministic or options.get("deterministic", False)
        return emulated_backward(monkeypatch, "9.0", **(options | arrays))

    monkeypatch.setattr(cuflash, "attention_backward", emulated)
    judge(case, NumpyBackend(), "auto")


LENGTHS = (0, 1, 31, 32, 33, 64, 97)
BOUNDS = (None, 0, 1, 31, 32, 33, 64, 100)


def _code_of_tiles_of_32() -> ctypes.CDLL:
    variant = sm80._Variant(256, 256, "float16", True, False, True, True)
    tile = variant.tile(named("8.6"))
    assert (tile.q_rows, tile.keys) == (32, 32)
    return host_code(variant.specialisation(tile))


@pytest.mark.parametrize(("heads", "section"), [(1, 1), (5, 1), (5, 2), (6, 3), (4, 4), (3, 9)])
@pytest.mark.parametrize("key_blocks", [1, 4])
def test_tickets(heads: int, section: int, key_blocks: int) -> None:
    """Every tile of keys of every head once; those of a head in one order."""
    code, found = _code_of_tiles_of_32(), (ctypes.c_int * 3)()
    drawn: dict[int, list[int]] = {}
    for ticket in range(heads * key_blocks):
        code.drawn(ticket, heads, key_blocks, section, found)
        head, keys, rises = found
        assert rises == (head >= heads - section)
        drawn.setdefault(head, []).append(keys)
    assert list(drawn) == sorted(range(heads), key=lambda head: -((heads - 1 - head) // section))
    for head, order in drawn.items():
        assert order == list(range(key_blocks))[:: 1 if head >= heads - section else -1]


def test_blocks_go_through_the_tiles_that_matter() -> None:
    """Those with a visible pair, first to last; call no tile clean that has a hidden one; and add
    to each tile of queries in turn.
    """
    code = _code_of_tiles_of_32()
    found = (ctypes.c_int * 4)()
    for q_len, kv_len, left, right, top_left in itertools.product(
        LENGTHS, LENGTHS, BOUNDS, BOUNDS, (False, True)
    ):
        diagonal = 0 if top_left else kv_len - q_len
        blocks = _visible_blocks(q_len, kv_len, diagonal, left, right)
        bounds = [1 << 29 if bound is None else bound for bound in (left, right)]
        walks = []
        for at, row in enumerate(blocks):
            code.key_tiles(32 * at, q_len, kv_len, diagonal, *bounds, found)
            _assert_walk(row, list(found))
            walks.append(range(*found[:2]))
        for rises in (False, True):
            taken = [0] * -(-q_len // 32)
            for at in range(len(walks))[:: 1 if rises else -1]:
                for queries in walks[at]:
                    turn = code.turn(rises, at, queries, kv_len, diagonal, *bounds)
                    assert turn == taken[queries]
                    taken[queries] += 1


def _visible_blocks(q_len: int, kv_len: int, diagonal: int, left: Any, right: Any) -> Array:
    """How many pairs of each tile of 32 keys x 32 queries are visible."""
    keys, queries = -(-kv_len // 32), -(-q_len // 32)
    j, i = np.arange(32 * keys)[:, None], np.arange(32 * queries)
    visible = (j < kv_len) & (i < q_len)
    if left is not None:
        visible &= j >= i + diagonal - left
    if right is not None:
        visible &= j <= i + diagonal + right
    return visible.reshape(keys, 32, queries, 32).sum(axis=(1, 3))


def _assert_walk(pairs: Array, found: list[int]) -> None:
    begin, end, clean_begin, clean_end = found
    some = np.flatnonzero(pairs)
    if some.size:
        assert begin <= some[0]
        assert some[-1] < end
        assert (begin, end) == (some[0], some[-1] + 1)
    assert 0 <= begin <= end <= max(len(pairs), begin)
    for at in range(begin, end):
        assert (clean_begin <= at < clean_end) == (pairs[at] == 32 * 32), (at, found, pairs)
