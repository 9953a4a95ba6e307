"""`python -m bench compile`: how long kernels take to compile, and what a first call waits for."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from cuflash.runtime import cache, compiler, device
from cuflash.runtime.compiler import CompileError

from . import configurations, options, static
from .processes import environment, tidy
from .session import Session

_DIMS = (64, 128, 256)
_FIRST_CALL_S = 180.0


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_bench(
        commands,
        "compile",
        run,
        "how long kernels take to compile, and what the first call of a process waits for",
        "python -m bench compile",
        "python -m bench compile --archs sm_80 --dims 128 --families sm80",
    )
    static.add_selection(command)
    command.set_defaults(archs=(), dims=_DIMS, families=configurations.FORWARD)


def run(run_: Session, chosen: argparse.Namespace) -> None:
    """As the options say."""
    measure(run_, chosen.archs, chosen.dims, chosen.families)


def measure(
    run_: Session,
    archs: Sequence[str] = (),
    dims: Sequence[int] = _DIMS,
    families: Sequence[str] = configurations.FORWARD,
) -> None:
    """One after another, past the cache; for this machine's GPU, or 8.0 and 9.0 without one."""
    if not static.can_compile(run_, "compile"):
        return
    rows: list[dict[str, Any]] = []
    for one in configurations.tuned(archs or _here(run_), dims, families):
        if run_.is_late:
            run_.results.skip(f"compile: {one.name}", "out of time")
            continue
        spec, arch = one.module.specialisation, one.module.arch
        try:
            built = compiler.compile_cubin(spec.text(), arch, spec.name, show_progress=False)
        except CompileError as error:
            run_.faults.append(f"compile: {spec.name} for {arch}: {tidy(error.log)}")
            continue
        rows.append(
            {
                "arch": arch, "family": one.module.family, "kernel": spec.name,
                "seconds": round(built.seconds, 3), "bytes": len(built.cubin),
            }
        )  # fmt: skip
    if rows:
        seconds = [row["seconds"] for row in rows]
        print(
            f"\ncompile: {len(rows)} kernels by NVRTC {compiler.version_text()}, median "
            f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        )
    if run_.place == "cuda" and not run_.is_late:
        try:
            rows += _first_calls(rows)
        except (subprocess.SubprocessError, RuntimeError) as error:
            run_.results.skip("compile: the first call", tidy(str(error)))
    run_.results.add("compile", rows)
    run_.results.data["versions"]["NVRTC"] = compiler.version_text()


def _here(run_: Session) -> tuple[str, ...]:
    if run_.place != "cuda":
        return ("sm_80", "sm_90a")
    major, minor = device.cuda_device(0).compute_capability or (0, 0)
    return (f"sm_{major}{minor}",)


def was_compiled(seconds: float, alone: float | None) -> bool:
    """Whether a kernel's compiling took what it does, or an answer came from a cache of NVRTC's."""
    return alone is None or seconds > alone / 3


def _first_calls(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In processes of their own: with an empty cache, and with what the first left there. `rows`
    are of kernels compiled before.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "bench.first_call"],
                env=environment(**{cache.VARIABLE: folder}), capture_output=True, text=True,
                check=False, timeout=_FIRST_CALL_S,
            )  # fmt: skip
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise RuntimeError(said[-1])
            found.append(json.loads(done.stdout.splitlines()[-1]))
    uncached, cached = (one["seconds"] for one in found)
    kernel, compiling = found[0]["kernel"], found[0]["compiling"]
    alone = next((row["seconds"] for row in rows if row["kernel"] == kernel), None)
    if found[0]["before"] or uncached < compiling or not was_compiled(compiling, alone):
        raise RuntimeError(
            f"the first call took {uncached:.2f} s, of which compiling is said to be "
            f"{compiling:.2f}, {alone} by itself, and {found[0]['before']} modules were there "
            "before"
        )
    print(f"first call of a process: {uncached:.2f} s, from the cache {cached:.2f} s")
    return [
        {"kernel": kernel, "uncached_s": uncached, "compiling_s": compiling, "cached_s": cached}
    ]
