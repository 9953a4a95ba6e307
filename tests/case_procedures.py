"""The attention cases that are steps to take rather than one call: devices, threads and forks.

What has to be the first use of the library, or of CUDA, in a process is done in a fresh one.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from attention_cases import Backend, Case, CudaBackend, NumpyBackend
from case_expectations import Trial, judge, judge_trial
from case_recipes import HostArray

import cuflash

THREADS = 16
# A process compiles or hangs: the limit only has to tell the two apart.
TIMEOUT_S = 300
TOLERANCE = {
    "float16": {"atol": 0.002, "rtol": 0.004},
    "bfloat16": {"atol": 0.016, "rtol": 0.016},
}


def by_value(case: Case, dtype: str = "float16", **options: Any) -> Case:
    """The call of a case, perhaps in another dtype or with more options, judged by its result."""
    close = {"type": "close", "targets": ["out"], **TOLERANCE[dtype]}
    options = {**case["options"], **options}
    return {**case, "dtype": dtype, "options": options, "expect": close, "also": []}


class ChildError(Exception):
    """A function raised in another process; the message is its traceback there."""


def call_in_process(method: str, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result in a process started by `method`; raise if it raises, dies or hangs."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, function, args))
    process.start()
    # With the parent's copy closed, a child that dies ends the pipe.
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            raise TimeoutError(f"{function.__name__} still runs after {TIMEOUT_S} s")
        failure, result = receiver.recv()
    finally:
        process.kill()
        process.join()
        receiver.close()
    if failure:
        raise ChildError(failure)
    return result


def _report(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
    except Exception:
        sender.send((traceback.format_exc(), None))
        raise
    sender.send((None, result))


# --- case-53: arrays of a device that is not the current one ------------------------------------


class OtherDevice(CudaBackend):
    """Arrays of a device chosen by number, whichever device is current."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def place(self, arrays: Mapping[str, HostArray]) -> dict[str, Any]:
        with self.cupy.cuda.Device(self.index):
            return super().place(arrays)

    def to_host(self, array: Any) -> np.ndarray:
        assert array.device.id == self.index, f"out is on {array.device}, q on {self.index}"
        return super().to_host(array)


def current_device(case: Case, family: str) -> None:
    """The arrays' device computes, the current device stays current, two devices do not mix."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    plain = by_value(case)
    with cupy.cuda.Device(0):
        for index in (1, 0):
            judge(plain, OtherDevice(index), family)
            assert cupy.cuda.Device().id == 0, "the current device was changed"
        host = Trial(plain, OtherDevice(0), family).call.arrays
        here, there = OtherDevice(0).place(host), OtherDevice(1).place(host)
        with pytest.raises(ValueError, match=r"\b[qkv]\b"):
            cuflash.attention(here["q"], there["k"], here["v"], layout="bshd", kernel=family)


# --- case-58: the first calls of a process, from many threads -----------------------------------


def thread_race(case: Case, family: str) -> None:
    """Threads that meet in the first calls get the right results and compile nothing twice."""
    alone = call_in_process("spawn", _compilations_of_first_calls, case, family, False)
    together = call_in_process("spawn", _compilations_of_first_calls, case, family, True)
    assert together == alone, f"{together} compilations where {alone} are enough"


def _compilations_of_first_calls(case: Case, family: str, in_threads: bool) -> int:
    """How often this process compiles CUDA source of the library for two configurations."""
    configurations = [
        by_value(case, causal=True),
        by_value(case, "bfloat16", window=[10, 0]),
    ]
    with tempfile.TemporaryDirectory() as empty_cache, pytest.MonkeyPatch.context() as patch:
        for variable in ("CUFLASH_CACHE_DIR", "CUPY_CACHE_DIR"):
            patch.setenv(variable, empty_cache)
        compiled = _record_compilations(patch)
        if in_threads:
            _judge_at_once(configurations * (THREADS // len(configurations)), family)
        else:
            for configuration in configurations:
                judge(configuration, CudaBackend(), family)
    return len(compiled)


def _record_compilations(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives each source of the library given to NVRTC from now on."""
    from cupy.cuda import nvrtc

    compiled: list[str] = []
    create = nvrtc.createProgram

    def record(source: str, *args: Any) -> Any:
        # CuPy compiles small kernels of its own by the same way.
        if "cuflash" in source:
            compiled.append(source)
        return create(source, *args)

    patch.setattr(nvrtc, "createProgram", record)
    return compiled


def _judge_at_once(cases: Sequence[Case], family: str) -> None:
    barrier = threading.Barrier(len(cases), timeout=TIMEOUT_S / 2)

    def first_call(case: Case) -> None:
        trial = Trial(case, CudaBackend(), family)
        # Inputs are made before the barrier, so that the calls themselves meet.
        _ = trial.call
        barrier.wait()
        judge_trial(trial)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(first_call, cases))


# --- case-59: forking around the first use of CUDA ----------------------------------------------


def fork_safety(case: Case, family: str) -> None:
    """A child forked before CUDA was used can use it; one forked after fails with an error."""
    call_in_process("spawn", _fork_before_and_after_cuda, by_value(case), family)


def fork_safety_on_cpu(case: Case) -> None:
    """A child forked after the CPU family was used can use it, and CuPy was never imported."""
    call_in_process("spawn", _fork_after_numpy, by_value(case), "numpy", "auto")


def _fork_before_and_after_cuda(case: Case, family: str) -> None:
    _fork_after_numpy(case, "cuda", family)
    _judge_on(case, "cuda", family)
    # CUDA's own message is clear enough; a hang would be a TimeoutError.
    with pytest.raises(ChildError, match=r"fork|initialization error"):
        call_in_process("fork", _judge_on, case, "cuda", family)


def _fork_after_numpy(case: Case, backend: str, kernel: str) -> None:
    _judge_on(case, "numpy", "auto")
    assert "cupy" not in sys.modules, "the CPU family imported CuPy"
    call_in_process("fork", _judge_on, case, backend, kernel)


def _judge_on(case: Case, backend: str, kernel: str) -> None:
    backends: dict[str, Callable[[], Backend]] = {"numpy": NumpyBackend, "cuda": CudaBackend}
    judge(case, backends[backend](), kernel)


PROCEDURES: dict[str, Callable[[Case, str], None]] = {
    "case-53-current-device": current_device,
    "case-58-first-use-thread-race": thread_race,
    "case-59-fork-safety": fork_safety,
}
