"""`python -m bench backward`: gradients beside those of torch's backends, in one process."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import cuflash

from . import inputs, options
from .peers import Unsupported
from .session import Session
from .shapes import LISTS, Problem, select
from .stopwatch import GpuStopwatch

OURS, DETERMINISTIC, STANDARD = "cuflash", "deterministic", "standard"
PEERS = {"torch-cudnn": "CUDNN_ATTENTION", "torch-flash": "FLASH_ATTENTION"}
_PRODUCTS = 2.5  # of a forward pass, by which papers count
_SLOW = 4096  # keys, beyond which the standard family is left out: it would take most of the time


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "backward",
        run,
        "gradients beside those of torch's backends",
        "python -m bench backward",
        "python -m bench backward --dims 128 --seqs 4096,16384 --masks causal --rounds 5",
    )
    options.add_selection(command, LISTS, ("float16", "bfloat16"), "paper")
    options.add_kernel(command)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    if not run_.needs_gpu("backward"):
        return
    for name in chosen.list or ("paper",):
        for problem in select(
            name, dims=chosen.dims, seqs=chosen.seqs, dtypes=chosen.dtypes, masks=chosen.masks
        ):
            if run_.is_late:
                run_.results.skip(f"backward {problem}", "out of time")
                continue
            row = measure(run_, problem)
            run_.results.add("backward", [row])
            print(describe(row), flush=True)


def measure(run_: Session, problem: Problem) -> dict[str, Any]:
    """Time each column of a problem in turns of random order."""
    import cupy

    q, k, v = inputs.random_inputs(cupy, problem, seed=1)
    dout = inputs.random_inputs(cupy, problem, seed=2)[0]
    calls: dict[str, Callable[[], Any]] = {}
    for name, make in _makers(run_.kernel).items():
        try:
            call = make(problem, dout, q, k, v)
            call()
            cupy.cuda.Device().synchronize()
        except (Unsupported, ImportError, NotImplementedError, RuntimeError) as error:
            run_.results.skip(f"{name} {problem}", str(error).splitlines()[0])
            continue
        calls[name] = call
    watch, pace = GpuStopwatch(cupy, run_.flush_below), run_.pace
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(pace.rounds):
        for name in random.sample(list(calls), len(calls)):
            estimate = watch.estimate(calls[name])
            times[name].append(
                watch.window(calls[name], estimate, pace.settle_ms, pace.window_ms, flush=False)
            )
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        **problem.to_dict(),
        "ms": medians,
        "tflops": {
            name: _PRODUCTS * problem.flops / ms * 1e-9 for name, ms in medians.items()
        },
    }  # fmt: skip


def describe(row: Mapping[str, Any]) -> str:
    """A line for people: TFLOP/s of each column, and ours as a ratio to each peer."""
    found = row["tflops"]
    shape = f"{row['dtype']} s{row['kv_len']} d{row['dim']} {'causal' if row['causal'] else 'full'}"
    parts = [f"{name} {value:.0f}" for name, value in found.items()]
    ours = found.get(OURS, 0.0)
    ratios = [f"{ours / found[name]:.2f} of {name}" for name in PEERS if name in found]
    return f"{shape:<28} {', '.join(parts)}; {', '.join(ratios)}"


_Maker = Callable[[Problem, Any, Any, Any, Any], Callable[[], Any]]


def _makers(kernel: str) -> dict[str, _Maker]:
    found = {OURS: _ours(kernel), DETERMINISTIC: _ours(kernel, deterministic=True)}
    found |= {name: _torch(backend) for name, backend in PEERS.items()}
    return found | {STANDARD: _standard}


def _ours(kernel: str, **more: Any) -> _Maker:
    def make(problem: Problem, dout: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        out, lse = cuflash.attention(q, k, v, causal=problem.causal, return_lse=True)
        return lambda: cuflash.attention_backward(
            dout, q, k, v, out, lse, causal=problem.causal, kernel=kernel, **more
        )

    return make


def _standard(problem: Problem, dout: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    if problem.kv_len > _SLOW:
        raise Unsupported(f"more than {_SLOW} keys")
    return _ours("standard")(problem, dout, q, k, v)


def _torch(backend: str) -> _Maker:
    def make(problem: Problem, dout: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from .peers.torch_arrays import to_torch

        if problem.causal and problem.q_len != problem.kv_len:
            raise Unsupported("its causal mask is aligned at the first key")
        tensors = [to_torch(array).requires_grad_() for array in (q, k, v)]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                *tensors, is_causal=problem.causal,
                enable_gqa=problem.q_heads != problem.kv_heads,
            )  # fmt: skip
        gradient = to_torch(dout)
        return lambda: torch.autograd.grad(out, tensors, gradient, retain_graph=True)

    return make
