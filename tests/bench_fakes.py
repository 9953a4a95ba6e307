"""A library for the bench's processes to call, which works, or fails in a way of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from bench.peers import Prepared, Unsupported, blas
from bench.shapes import Problem


def versions(does: str = "attends") -> dict[str, str]:
    if does == "is not installed":
        raise ImportError("No module named 'fake'")
    if does == "starts for ever":
        time.sleep(600)
    return {"fake": "1.0"}


def make(problem: Problem, q: Any, k: Any, v: Any, does: str = "attends") -> Prepared:
    if does == "refuses":
        raise Unsupported("takes no such problem")
    if does == "raises":
        raise RuntimeError("first line\nsecond line")
    if does == "prints":
        print("what a library may print")
        os.write(1, b"and what its C code may\n")
    if does == "sees other inputs":
        # The judge tells by the digest of what the process was given.
        q += 1
    last: list[Any] = []
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if does == "dies":
            sys.stderr.write("terminate called\n")
            os._exit(3)
        if does == "hangs when timed" and calls > 1:
            time.sleep(600)
        if does == "dies when timed" and calls > 1:
            os._exit(4)
        last[:] = [blas.plain_attention(q, k, v, problem.causal)]
        if does == "is wrong in one row":
            last[0][-1, -1, -1] += 0.1
        if does == "leaves NaN":
            last[0][0, 0, 0, 0] = float("nan")

    return Prepared(call, lambda: last[0], does)


def answer(what: int) -> int:
    return 2 * what
