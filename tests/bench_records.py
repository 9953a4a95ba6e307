"""Made records of the bench, with every bench in them."""

from __future__ import annotations

from typing import Any

from bench.session import add_rates
from bench.shapes import Problem, select

CEILINGS = {
    "matmul float16": {"tflops": 700.0, "spread": 0.01},
    "matmul e4m3": {"tflops": 1300.0, "spread": 0.01},
    "copy": {"gb_s": 4000.0, "spread": 0.0},
}


def record(**benches: Any) -> dict[str, Any]:
    return {
        "format": 1, "command": "python -m bench all", "date": "2026-11-30 12:00 UTC",
        "commit": "0123", "cuda_sources": "abcd", "board": {}, "versions": {"torch": "2.11.0"},
        "environment": {
            "cuflash": "0.1.0", "python": "3.12.3", "numpy": "2.5.2", "blas": "openblas",
            "cupy": "14.2.0", "cuda": "driver API 13.0", "devices": ["CPU", "NVIDIA H200"],
        },
        "ceilings": CEILINGS, "benches": benches, "skipped": [],
    }  # fmt: skip


def row(
    problem: Problem, times: dict[str, float | str], judged: str = "float16", **labels: Any
) -> dict[str, Any]:
    """A row with milliseconds of each column; or a word, of a column without a time."""
    column: dict[str, dict[str, Any]] = {
        name: {"ms": time, "spread": 0.01, "rounds": 5, "error": 3e-4}
        if isinstance(time, float)
        else {time: "for a reason"}
        for name, time in times.items()
    }
    found = {"list": "paper", **labels, **problem.to_dict(), "flushed": False, "columns": column}
    add_rates(found, problem, CEILINGS, dict.fromkeys(times, judged))
    return found


def forward(factor: float = 1.0, **labels: Any) -> list[dict[str, Any]]:
    """The table of the paper; ours takes `factor` times as long as in another."""
    return [
        row(
            problem,
            {
                "cuflash": factor * problem.flops / 600e9,
                "fa3": problem.flops / 550e9,
                "torch-cudnn": problem.flops / 500e9,
                "fa4": "failed",
                "standard": problem.flops / 50e9,
            },
            **labels,
        )
        for problem in select("paper", dims=(64, 128))
    ]


def everything() -> dict[str, Any]:
    """A record of every bench."""
    fp8 = [
        row(
            problem,
            {"f8": problem.flops / 900e9, "i8": problem.flops / 700e9, "fa3": problem.flops / 8e11},
            "8 bits", list="fp8",
        )
        for problem in select("fp8")
    ]  # fmt: skip
    backward = [
        row(
            problem,
            {
                "cuflash": problem.flops / 200e9,
                "deterministic": problem.flops / 180e9,
                "torch-cudnn": problem.flops / 180e9,
                "torch-flash": problem.flops / 100e9,
            },
        )
        for problem in select("paper", dims=(64,))
    ]
    quantize = [
        {
            **row(problem, {"copy": 0.3, "quantise f8": 0.4}, list="fp8"),
            "of_copy": {"f8": 0.75}, "to_16_bits": {"f8": 1.2},
        }
        for problem in select("fp8", dims=(128,))
    ]  # fmt: skip
    memory: list[dict[str, Any]] = [
        {"column": "cuflash", "seq": seq, "ms": seq / 1e4, "bytes": 1000 * seq}
        for seq in (1024, 4096, 16384)
    ]
    memory += [
        {
            "column": "cuflash", "exponent": 1.0, "exponent_error": 0.0, "time_exponent": 1.9,
            "from": 1024, "to": 16384,
        },
        {"column": "cuflash", "largest": 130_000_000, "heads": 1, "dim": 128, "bytes_each": 1.3e11},
    ]  # fmt: skip
    io = [
        {"column": name, "seq": seq, "measured": 1.05e9 * seq, "predicted": 1e9 * seq}
        for name in ("cuflash", "standard")
        for seq in (512, 2048)
    ]
    static = [
        {
            "arch": "sm_90a", "family": "sm90", "kernel": "cuflash_fwd_sm90_d128", "dim": 128,
            "causal": False, "bits": 16, "tile": "192x80", "warps": 12, "shared_memory": 181248,
            "registers": 128, "spilled_bytes": 0, "resident_blocks": 1, "mma": 1920.0,
            "mufu": 960.0, "issue": 792.0, "shared": 1344.0, "instructions": 264.0, "mix": {},
            "limiters": ["MMA"], "bound": 1.0,
        }
    ]  # fmt: skip
    compiled = [
        {"arch": "sm_90a", "family": "sm90", "kernel": "k", "seconds": 1.5, "bytes": 9},
        {"kernel": "k", "uncached_s": 2.0, "compiling_s": 1.5, "cached_s": 0.1},
    ]
    decode = [
        row(problem, {"cuflash": 0.1, "fa3": 0.2}, list="decode") for problem in select("decode")
    ]
    return record(
        forward=forward() + decode, backward=backward, fp8=fp8, quantize=quantize, memory=memory,
        io=io, static=static, compile=compiled,
        host=[{"call": "cuflash", "us": 11.6, "spread": 0.02}],
    )  # fmt: skip
