"""What is kept of calls: bounded, safe with threads and forks, and told apart by fingerprints."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from comparison import Array
from small_calls import Q, attention, fresh, same, values

import cuflash
from cuflash import kinds
from cuflash.arrays import describe, fingerprint

Patch = pytest.MonkeyPatch


# --- the store ------------------------------------------------------------------------------------


def test_the_store_is_bounded(monkeypatch: Patch) -> None:
    monkeypatch.setattr(kinds, "_MOST", 3)
    k, v = values((2, 2, 20, 8)), values((2, 2, 20, 5))
    sizes = []
    for n in (*range(1, 11), *range(1, 11)):
        result = attention(k=k[:, :, :n], v=v[:, :, :n])
        sizes.append(len(kinds._kinds))
        mean = cuflash.oracle.attention(values(Q), k[:, :, :n], v[:, :, :n])[0]
        np.testing.assert_allclose(result, mean, atol=1e-5)
    assert max(sizes) == 3


def test_threads(monkeypatch: Patch) -> None:
    """They meet in few kinds and many, while the store is cleared again and again."""
    monkeypatch.setattr(kinds, "_MOST", 4)
    k, v = values((2, 2, 20, 8)), values((2, 2, 20, 5))
    works = [
        {"k": k[:, :, :n], "v": v[:, :, :n], "causal": causal, "return_lse": True}
        for n in (5, 11, 20)
        for causal in (False, True)
    ]
    expected = [fresh(**work) for work in works]
    kinds.forget()

    def many(seed: int) -> list[bool]:
        order = np.random.default_rng(seed).integers(0, len(works), 150)
        return [same(attention(**works[at]), expected[at]) for at in order]

    with ThreadPoolExecutor(8) as pool:
        found = list(itertools.chain(*pool.map(many, range(8))))
    assert len(found) == 8 * 150
    assert all(found)
    assert len(kinds._kinds) <= 4 + 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_empty() -> None:
    for _ in range(2):
        attention()
    assert len(kinds._kinds) == 1
    child = os.fork()
    if child == 0:
        os._exit(len(kinds._kinds) + (kinds._latest[1] is not None))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(kinds._kinds) == 1


# --- fingerprints ---------------------------------------------------------------------------------


def views() -> list[Array]:
    memory = np.zeros(512, np.uint8)
    start = memory[-memory.ctypes.data % 16 :]
    half, single = start[:256].view(np.float16), start[:256].view(np.float32)
    return [
        half[:24].reshape(4, 6),
        half[:24].reshape(6, 4),
        half[1:25].reshape(4, 6),
        half[:24].reshape(4, 3, 2),
        half[:48].reshape(4, 12)[:, ::2],
        half[:48].reshape(8, 6)[::2],
        np.broadcast_to(half[:6], (4, 6)),
        half[23::-1].reshape(4, 6),
        half[:24].view(np.int16).reshape(4, 6),
        half[:24].view(ml_dtypes.bfloat16).reshape(4, 6),
        single[:24].reshape(4, 6),
        start[:24].view(bool).reshape(4, 6),
        half[:0].reshape(0, 6),
        half[8:32].reshape(4, 6),
    ]


def test_a_fingerprint_tells_apart_what_descriptions_do() -> None:
    found = [(fingerprint(view), describe("q", view)) for view in views()]
    for (print_a, a), (print_b, b) in itertools.combinations(found, 2):
        assert a == b or print_a != print_b
    assert found[0][0] == found[-1][0], "16 bytes further on"
    assert len({hash(one) for one, _ in found}) > 1
