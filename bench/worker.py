"""The process of one column: holds its arrays, and answers requests, one JSON object a line.

    python -m bench.worker MODULE PLACE OPTIONS [TREE]

PLACE is cuda or cpu, where its arrays lie; TREE is a folder whose modules come before others, as
cuflash's of another version. It greets with its versions, or the reason why it can't
work. Every request has an ``"op"``, a method of `Worker`; an answer has ``"value"``, or
``"error"`` and whether it is ``"unsupported"`` or ``"fatal"``. Libraries may print: what they
print goes to standard error.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from . import gradient_samples
from .inputs import digest, random_inputs
from .peak import peak_bytes
from .peers import Prepared, Unsupported
from .samples import Array, Sample, exact_rows, rows_of
from .shapes import Problem
from .stopwatch import CpuStopwatch, GpuStopwatch, Stopwatch


class Worker:
    """What one process holds: a module of `peers`, the problem at hand, and its call."""

    def __init__(self, module: Any, place: str, options: dict[str, Any]) -> None:
        self._module, self._options = module, options
        self._problem: Problem | None = None
        self._prepared: Prepared | None = None
        self._estimate = 0.0
        self._stopwatch: Stopwatch
        if place == "cuda":
            import cupy

            self._xp: Any = cupy
            l2_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
            self._stopwatch = GpuStopwatch(cupy, l2_bytes)
        else:
            self._xp = np
            self._stopwatch = CpuStopwatch()

    def prepare(self, problem: dict[str, Any], seed: int) -> dict[str, Any]:
        """Make the inputs and call once; the answer has a digest of the inputs."""
        self.release()
        given = Problem(**problem)
        inputs = random_inputs(self._xp, given, seed)
        found = digest(self._xp, inputs)
        prepared = self._module.make(given, *inputs, **self._options)
        prepared.call()  # compiles, or loads
        self._wait()
        self._problem, self._prepared, self._estimate = given, prepared, 0.0
        return {"digest": found, "note": prepared.note, "work": prepared.work}

    def window(self, settle_ms: float, window_ms: float, flush: bool) -> float:
        """Milliseconds of a call."""
        call = self._call()
        if not self._estimate:  # not earlier: all processes prepare at once
            self._estimate = max(self._stopwatch.estimate(call), 1e-4)
        return self._stopwatch.window(call, self._estimate, settle_ms, window_ms, flush)

    def host(self, calls: int) -> float:
        """Microseconds that the host takes for a call."""
        return self._stopwatch.host_us(self._call(), calls)

    def peak(self) -> int:
        """Most bytes at once for results and workspace, beside the inputs."""
        call = self._call()
        assert self._prepared is not None
        return self._prepared.held + peak_bytes(self._xp, call)

    def rows(self, samples: list[Any]) -> dict[str, Any]:
        """Sampled rows of the result of the last call."""
        self._call()
        assert self._prepared is not None
        if self._prepared.result is None:
            raise ValueError("there is no result to judge")
        result, chosen = self._prepared.result(), _unpacked_samples(samples)
        if isinstance(result, tuple):
            assert self._problem is not None
            return pack(gradient_samples.found_rows(self._xp, self._problem, result, chosen))
        return pack(rows_of(self._xp, result, chosen))

    def exact(
        self, problem: dict[str, Any], seed: int, samples: list[Any], gradients: bool = False
    ) -> dict[str, Any]:
        """The same rows in float64, and a digest of the inputs that they are of."""
        known = gradient_samples.exact_rows if gradients else exact_rows
        answer = self._exact(known, Problem(**problem), seed, _unpacked_samples(samples))
        self.release()
        return answer

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Another function of the module."""
        return getattr(self._module, name)(**arguments)

    def release(self) -> None:
        """Give memory back."""
        self._prepared = None
        if self._xp is np:
            return
        self._xp.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def is_usable(self) -> bool:
        """Whether the device still answers: after a fault of a kernel no call does."""
        try:
            self._wait()
        except Exception:
            return False
        return True

    def _exact(
        self, known: Callable[..., Array], problem: Problem, seed: int, samples: list[Sample]
    ) -> dict[str, Any]:
        inputs = random_inputs(self._xp, problem, seed)
        rows = known(self._xp, problem, *inputs, samples)
        return {"digest": digest(self._xp, inputs), "rows": pack(rows)}

    def _call(self) -> Any:
        if self._prepared is None:
            raise ValueError("nothing is prepared")
        return self._prepared.call

    def _wait(self) -> None:
        if self._xp is not np:
            self._xp.cuda.Device().synchronize()


OPERATIONS = ("prepare", "window", "host", "peak", "rows", "exact", "call", "release")


def pack(array: Any) -> dict[str, Any]:
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"shape": array.shape, "dtype": array.dtype.name, "data": data}


def unpack(packed: dict[str, Any]) -> Any:
    """What `pack` packed."""
    data = base64.b64decode(packed["data"])
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])


def _unpacked_samples(samples: list[Any]) -> list[Sample]:
    return [Sample(entry, head, tuple(rows)) for entry, head, rows in samples]


def serve(
    requests: TextIO, answers: TextIO, name: str, place: str, options: dict[str, Any]
) -> None:
    """Greet, and answer until the requests end."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        module = importlib.import_module(name)
        versions = module.versions(**options)
        worker = Worker(module, place, options)
    except Exception as error:
        say({"absent": f"{type(error).__name__}: {error}"})
        return
    say({"versions": versions})
    for line in requests:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation not in OPERATIONS:
                raise ValueError(f"op: got {operation!r}; expected one of {', '.join(OPERATIONS)}")
            say({"value": getattr(worker, operation)(**request)})
        except Unsupported as reason:
            say({"error": str(reason), "unsupported": True})
        except Exception as error:
            traceback.print_exc()
            fatal = not worker.is_usable()
            say({"error": f"{type(error).__name__}: {error}", "fatal": fatal})
            if fatal:
                return


def main() -> None:
    """Serve on standard input and on what was standard output."""
    name, place, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sys.path[:0] = filter(None, sys.argv[4:])  # nothing has imported cuflash yet
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers, name, place, options)


if __name__ == "__main__":
    main()
