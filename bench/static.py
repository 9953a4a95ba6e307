"""`python -m bench static`: every tuned kernel compiled for every architecture, without the
hardware: what it takes, and what limits it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cuflash.cli_shared import words
from cuflash.runtime import cache, compiler
from cuflash.runtime.compiler import CompileError

from . import configurations, limits, options, sass
from .configurations import ARCHITECTURES, BACKWARD, DIMS, FORWARD, Configuration
from .session import Session

FAMILIES = (*FORWARD, *BACKWARD)


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "static",
        run,
        "registers, shared memory, instruction mix and predicted limiter of every tuned kernel",
        "python -m bench static",
        "python -m bench static --archs sm_90a --dims 128",
    )
    add_selection(command)


def add_selection(command: argparse.ArgumentParser) -> None:
    """Which kernels."""
    command.add_argument(
        "--archs", type=words(ARCHITECTURES), default=ARCHITECTURES, metavar="SM[,SM]",
        help=f"of {', '.join(ARCHITECTURES)}; default: all",
    )  # fmt: skip
    command.add_argument(
        "--dims",
        type=options.numbers,
        default=DIMS,
        metavar="N[,N]",
        help="head dims; default: all",
    )
    command.add_argument(
        "--families", type=words(FAMILIES), default=FAMILIES, metavar="NAME[,NAME]",
        help=f"of {', '.join(FAMILIES)}; default: all",
    )  # fmt: skip


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    measure(run_, chosen.archs, chosen.dims, chosen.families)


def measure(
    run_: Session,
    archs: Sequence[str] = ARCHITECTURES,
    dims: Sequence[int] = DIMS,
    families: Sequence[str] = FAMILIES,
) -> None:
    """Compile, where the cache has not done so before, and tabulate."""
    if not can_compile(run_, "static"):
        return
    if sass.disassembler() is None:
        run_.results.skip("static", "needs nvdisasm: pip install nvidia-cuda-nvdisasm")
        return
    known = compiler.supported_architectures()
    archs = tuple(arch for arch in archs if _is_known(run_, arch, known))
    if not archs:
        return
    print(f"\nstatic, by NVRTC {compiler.version_text()}\n{_HEADER}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = []
        for row in pool.map(describe, configurations.tuned(archs, dims, families)):
            rows.append(row)
            print(_line(row), flush=True)
    run_.results.add("static", rows)
    run_.results.data["versions"]["NVRTC"] = compiler.version_text()
    run_.faults += [
        f"static: {row['kernel']} for {row['arch']}: {row['failed']}"
        for row in rows
        if "failed" in row
    ]


def can_compile(run_: Session, bench: str) -> bool:
    """Whether CuPy and NVRTC are here; else the bench is noted as skipped."""
    try:
        compiler.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        run_.results.skip(bench, f"needs CuPy and NVRTC: {str(error).splitlines()[0]}")
        return False
    return True


def describe(one: Configuration) -> dict[str, Any]:
    """What a kernel takes and the cycles of its main loop, JSON-ready; or why it failed."""
    row: dict[str, Any] = {
        "arch": one.module.arch, "family": one.module.family, "kernel": one.name,
        "dim": one.head_dim, "causal": one.causal, "bits": one.bits,
        "tile": f"{one.q_rows}x{one.keys}", "warps": one.warps,
        "shared_memory": one.shared_memory,
    }  # fmt: skip
    try:
        entry = cache.get(one.module.specialisation, one.module.arch, show_progress=False)
        resources = entry.resources[one.name]
        found = limits.cycles(one, sass.disassemble(entry.path.read_bytes()))
    except (CompileError, RuntimeError, ValueError, OSError) as error:
        return {**row, "failed": str(error).splitlines()[-1]}
    return {
        **row,
        "registers": resources.registers,
        "spilled_bytes": resources.spill_stores + resources.spill_loads,
        "resident_blocks": limits.resident_blocks(one, resources),
        **{name: round(value, 1) for name, value in _numbers(found).items()},
        "mix": {name: round(count, 1) for name, count in found.mix.items()},
        "limiters": list(found.limiters),
        "bound": round(found.bound, 3),
    }


def _numbers(found: limits.Cycles) -> dict[str, float]:
    fields = dataclasses.asdict(found)
    return {name: value for name, value in fields.items() if name != "mix"}


def _is_known(run_: Session, arch: str, known: Sequence[int]) -> bool:
    if int(arch.removeprefix("sm_").rstrip("a")) in known:
        return True
    run_.results.skip(f"static: {arch}", f"NVRTC {compiler.version_text()} does not know it")
    return False


_HEADER = (
    f"{'arch':<7} {'kernel':<46} {'tile':>8} {'regs':>4} {'spill':>5} {'KiB':>5} {'blocks':>6} "
    f"{'instr':>6} {'MMA':>6} {'MUFU':>5} {'issue':>5} {'shared':>6}  limited by"
)


def _line(row: dict[str, Any]) -> str:
    name = row["kernel"].removeprefix("cuflash_").removeprefix("fwd_")
    start = f"{row['arch']:<7} {name:<46} {row['tile']:>8} "
    if "failed" in row:
        return f"{start}FAILED {row['failed']}"
    shares = [f"{row[name] / row['mma']:.0%}" for name in ("mufu", "issue", "shared")]
    return (
        f"{start}{row['registers']:>4} {row['spilled_bytes']:>5} "
        f"{row['shared_memory'] / 1024:>5.0f} {row['resident_blocks']:>6} "
        f"{row['instructions']:>6.0f} {row['mma']:>6.0f} {shares[0]:>5} {shares[1]:>5} "
        f"{shares[2]:>6}  {', '.join(row['limiters'])}"
    )
