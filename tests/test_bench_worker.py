"""The worker of a column, in this process: on NumPy, and on a device that NumPy stands in for."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import worker
from bench.inputs import digest, random_inputs
from bench.peers import blas, judge
from bench.shapes import Problem
from bench.worker import Worker, pack, unpack

PROBLEM = Problem(1, 2, 1, 20, 30, 8, "float32", causal=True)


class FakeCupy(ModuleType):
    """NumPy with the parts of CuPy that a worker uses; `waits` counts how often it waited."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.waits, self.freed = 0, 0
        self.broken = False

        class RandomState(np.random.RandomState):
            def standard_normal(self, size: Any = None, dtype: Any = float) -> Any:
                return super().standard_normal(size).astype(dtype)

        class Event:
            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

        self.random = SimpleNamespace(RandomState=RandomState)
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(id=0, synchronize=self.wait),
            Event=Event,
            get_elapsed_time=lambda start, end: 2.0,
            runtime=SimpleNamespace(getDeviceProperties=lambda device: {"l2CacheSize": 1 << 20}),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def wait(self) -> None:
        self.waits += 1
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def get_default_memory_pool(self) -> Any:
        def free() -> None:
            self.freed += 1

        return SimpleNamespace(free_all_blocks=free)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_a_worker_on_a_device_does_all_that_it_is_asked(cupy: FakeCupy) -> None:
    one = Worker(blas, "cuda", {})
    prepared = one.prepare(PROBLEM.to_dict(), 3)
    assert prepared["digest"] == digest(np, random_inputs(np, PROBLEM, 3))
    assert cupy.waits == 1, "what a call queued is done before it is timed"
    assert one.window(settle_ms=4.0, window_ms=6.0, flush=False) == 2.0 / 10
    samples = [[0, 0, [0, 19]], [0, 1, [5]]]
    rows = unpack(one.rows(samples))
    judged = Worker(judge, "cuda", {}).exact(PROBLEM.to_dict(), 3, samples)
    assert judged["digest"] == prepared["digest"]
    np.testing.assert_allclose(rows, unpack(judged["rows"]), atol=1e-6)
    assert rows.shape == (3, 8)
    assert cupy.freed >= 2
    one.release()
    with pytest.raises(ValueError, match="nothing is prepared"):
        one.window(1.0, 1.0, False)


def test_a_window_is_as_long_as_calls_take_when_nobody_else_works(cupy: FakeCupy) -> None:
    """While all prepare at once, calls take longer: the estimate is made at the first window."""
    one = Worker(blas, "cuda", {})
    one.prepare(PROBLEM.to_dict(), 3)
    assert one._estimate == 0.0
    one.window(1.0, 1.0, False)
    assert one._estimate == 2.0 / 3


def test_arrays_are_packed_whole() -> None:
    for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4))):
        again = unpack(json.loads(json.dumps(pack(array))))
        assert again.dtype == array.dtype
        np.testing.assert_array_equal(again, array)


def serve(*requests: dict[str, Any], name: str = "bench_fakes", place: str = "cpu") -> list[Any]:
    answers = io.StringIO()
    text = "".join(json.dumps(request) + "\n" for request in requests)
    worker.serve(io.StringIO(text), answers, name, place, {})
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_it_greets_and_answers_each_request() -> None:
    greeting, first, second = serve(
        {"op": "prepare", "problem": PROBLEM.to_dict(), "seed": 1},
        {"op": "peak"},
    )
    assert greeting == {"versions": {"fake": "1.0"}}
    assert first["value"]["note"] == "attends"
    assert second["value"] > 0


def test_a_module_that_is_not_there_is_absent() -> None:
    (greeting,) = serve(name="bench.peers.nothing")
    assert greeting["absent"].startswith("ModuleNotFoundError")


def test_a_broken_device_ends_the_process(cupy: FakeCupy) -> None:
    cupy.broken = True
    answers = serve(
        {"op": "prepare", "problem": PROBLEM.to_dict(), "seed": 1}, {"op": "release"}, place="cuda"
    )
    assert len(answers) == 2, "nothing is answered after the fault"
    assert answers[1]["fatal"]
    assert "illegal memory access" in answers[1]["error"]
