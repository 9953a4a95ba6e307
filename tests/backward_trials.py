"""The attention cases that are judged by gradients: the calls, and their true answers in float64.

`reference_gradients` shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attention_cases
import numpy as np
from attention_cases import Backend, Case, CudaBackend, ForwardCall, Outcome
from case_expectations import Expectation, Trial, judge_trial

import cuflash

GRADIENTS = ("dq", "dk", "dv")


class BackwardTrial(Trial):
    """One case on one backend and kernel family, both passes."""

    @cached_property
    def outcome(self) -> Outcome:
        return run(self.call, self.backend, self.kernel)

    @property
    def expectations(self) -> list[Expectation]:
        """The main expectation and those that hold besides."""
        return [self.case["expect"], *self.case.get("also", [])]

    @property
    def owed(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each result."""
        arrays = ((name, self.call.arrays[name[1:]].view) for name in GRADIENTS)
        return super().owed | {name: (view.shape, view.dtype) for name, view in arrays}

    def got(self, target: str) -> np.ndarray:
        """A result in float64: packed if the case is, else only its sampled entries."""
        result = self.outcome.outputs[target].astype(np.float64)
        return self._packed(target, result) if self.call.packing else result[self._batches]

    def wanted(self, target: str) -> np.ndarray:
        """The true result for `got`."""
        return self._gradients[target] if target in GRADIENTS else super().wanted(target)

    @cached_property
    def _gradients(self) -> dict[str, np.ndarray]:
        found = reference_gradients(self.call, self._batches)
        if self.call.packing:
            return {name: self._packed(name, gradient) for name, gradient in found.items()}
        return found

    def _packed(self, target: str, padded: np.ndarray) -> np.ndarray:
        packing = self.call.key_packing if target in ("dk", "dv") else self.call.packing
        assert packing is not None
        return packing.pack(padded)

    @property
    def _batches(self) -> list[int]:
        sample = dict(self.case.get("sample", {}))
        batches = sample.pop("batch", list(range(self.call.shape("q")[0])))
        if sample:
            raise ValueError(f"{self.case['id']}: gradients can't be sampled by {sorted(sample)}")
        return batches


def judge(case: Case, backend: Backend, kernel: str) -> None:
    """Raise AssertionError with everything that does not hold for a case."""
    trial = BackwardTrial(case, backend, kernel)
    judge_trial(trial)


def run(call: ForwardCall, backend: Backend, kernel: str) -> Outcome:
    """Make both calls, of which the forward one may take any family; `kernel` is that of the
    backward pass. Whatever they raise is part of the outcome.
    """
    arrays = backend.place(call.arrays)
    mask = attention_cases.dense_mask(call)
    array_options = {"q_lens": call.q_lens, "kv_lens": call.kv_lens, "mask": mask}
    options = attention_cases.keyword_options(call) | {
        name: backend.asarray(x) for name, x in array_options.items() if x is not None
    }
    options["layout"] = "bshd"
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    sizes = [call.arrays[name].view.nbytes for name in "qkv"]
    try:
        out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        backend.poison([*sizes, *(2 * size for size in sizes)])
        gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **options, kernel=kernel)
        # Faults of a kernel surface when its result is read.
        host = [backend.to_host(x) for x in (out, lse, *gradients)]
    except Exception as error:
        return Outcome({}, error)
    return Outcome(dict(zip(("out", "lse", *GRADIENTS), host, strict=True)))


def reference_gradients(call: ForwardCall, batches: Sequence[int]) -> dict[str, np.ndarray]:
    """Gradients of some batch entries, (batch, seq, heads, dim) in float64, with whole matrices."""
    found = {name: np.zeros((len(batches), *call.shape(name[1:])[1:])) for name in GRADIENTS}
    heads = call.shape("q")[2]
    group = heads // max(call.shape("k")[2], 1)
    for at, batch in enumerate(batches):
        q_len = call.shape("q")[1] if call.q_lens is None else int(call.q_lens[batch])
        kv_len = call.shape("k")[1] if call.kv_lens is None else int(call.kv_lens[batch])
        q, k, v, dout = (
            call.arrays[name].view[batch, : kv_len if name in "kv" else q_len].astype(np.float64)
            for name in ("q", "k", "v", "dout")
        )
        for head in range(heads):
            kv = head // group
            rows = np.arange(q_len)
            visible = attention_cases._visible(call, batch, head, rows, q_len, kv_len)
            dq, dk, dv = _head_gradients(
                dout[:, head], q[:, head], k[:, kv], v[:, kv], visible, call.options
            )
            found["dq"][at, :q_len, head] = dq
            found["dk"][at, :kv_len, kv] += dk
            found["dv"][at, :kv_len, kv] += dv
    return found


def _head_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale = float(attention_cases.scale_of(options, q.shape[-1]))
    # Attention to the identity gives the weights.
    weights, _ = attention_cases._attend(q, k, np.eye(len(k)), visible, options)
    by_weight = dout @ v.T
    by_score = weights * (by_weight - (weights * by_weight).sum(axis=1, keepdims=True)) * scale
    softcap = options.get("softcap", 0)
    if softcap > 0:
        by_score *= 1 - np.tanh(scale * (q @ k.T) / softcap) ** 2
    return by_score @ k, by_score.T @ q, weights.T @ dout


# --- case-56: memory that a call has given back ---------------------------------------------------


def workspace_lifetime(case: Case, kernel: str) -> None:
    """What another stream writes into memory that the call gave back reaches no result."""
    import cupy

    trial = BackwardTrial(case, CudaBackend(), kernel)
    host, options = trial.call.arrays, attention_cases.keyword_options(trial.call)
    ours, others = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    kept = []
    for _ in range(50):
        with ours:
            arrays = trial.backend.place(host)
            q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
            out, lse = cuflash.attention(q, k, v, layout="bshd", return_lse=True, **options)
            gradients = cuflash.attention_backward(
                dout, q, k, v, out, lse, layout="bshd", kernel=kernel, **options
            )
            kept.append((out, *gradients))
            sizes = [q.nbytes, k.nbytes, lse.nbytes, 2 * q.nbytes]
            del q, k, v, dout, lse, gradients, out
        with others:
            filled = [cupy.full(size, 0xFF, np.uint8) for size in sizes]
            del filled
    cupy.cuda.Device().synchronize()
    close = {"type": "close", "targets": [*GRADIENTS], "atol": 0.01, "rtol": 0.01}
    for out, *gradients in kept:
        results = dict(zip(("out", *GRADIENTS), (out, *gradients), strict=True))
        trial.outcome = Outcome({name: array.get() for name, array in results.items()})
        trial.case = {**case, "expect": close, "also": [{"type": "finite", "targets": [*results]}]}
        judge_trial(trial)


PROCEDURES = {"case-56-workspace-lifetime": workspace_lifetime}
