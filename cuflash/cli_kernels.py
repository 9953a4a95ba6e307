"""The commands about compiled kernels: `cuflash warmup` and `cuflash cache`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

from . import families
from .cli_shared import add_command, as_json, words
from .plan import format_bytes
from .precompile import Built, warmup
from .runtime import cache
from .validate import GPU_DTYPES


def add_warmup(commands: Any) -> None:
    """The parser of `cuflash warmup`."""
    command = add_command(
        commands,
        "warmup",
        _warmup,
        "compile kernels ahead of time; needs no GPU",
        "cuflash warmup",
        "cuflash warmup --arch sm_80,sm_90",
        "cuflash warmup --arch 9.0 --head-dim 64,128 --dtype bfloat16 --json",
    )
    command.add_argument(
        "--arch",
        type=_names,
        default=(),
        metavar="SM[,SM]",
        help="such as sm_90 or 9.0; default: this machine's GPUs",
    )
    command.add_argument(
        "--family",
        type=words((*families.BUILT, *families.IN_8_BITS)),
        default=(),
        metavar="NAME[,NAME]",
        help="default: all",
    )
    command.add_argument(
        "--head-dim", type=_numbers, default=(), metavar="N[,N]", help="default: all"
    )
    command.add_argument(
        "--dtype",
        type=words(GPU_DTYPES),
        default=(),
        metavar="NAME[,NAME]",
        help="default: all",
    )


def add_cache(commands: Any) -> None:
    """The parser of `cuflash cache`."""
    command = add_command(
        commands,
        "cache",
        _cache,
        "what the cache of compiled kernels holds, or clear it",
        "cuflash cache info",
        "cuflash cache clear --json",
    )
    command.add_argument("action", choices=("info", "clear"))


def _warmup(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    results = warmup(
        options.arch,
        family=options.family,
        head_dim=options.head_dim,
        dtype=options.dtype,
        progress=None if options.json else _print_built,
    )
    failed = [built for built in results if built.error]
    if options.json:
        print(as_json([dataclasses.asdict(built) for built in results]))
    elif results:
        cached = sum(built.cached for built in results if not built.error)
        print(
            f"{len(results)} modules: {len(results) - cached - len(failed)} compiled, "
            f"{cached} cached, {len(failed)} failed, in {time.perf_counter() - begin:.1f} s; "
            f"{cache.folder()}"
        )
    if not results:
        print("cuflash warmup: no family compiles anything for that selection", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _print_built(built: Built, done: int, total: int) -> None:
    outcome = "FAILED" if built.error else "cached" if built.cached else f"{built.seconds:.2f} s"
    width = len(str(total))
    print(f"{done:>{width}}/{total}  {built.name}  {built.arch}  {outcome}", flush=True)
    if built.error:
        print(built.error, file=sys.stderr, flush=True)


def _cache(options: argparse.Namespace) -> int:
    if options.action == "clear":
        removed = cache.clear()
        result = {"folder": str(cache.folder()), "removed": removed}
        print(as_json(result) if options.json else f"{removed} modules removed, {cache.folder()}")
        return 0
    found = cache.info()
    if options.json:
        print(as_json(found.to_dict()))
        return 0
    print(f"{found.folder}: {found.entries} compiled modules, {format_bytes(found.bytes)}")
    for arch, count in found.architectures.items():
        print(f"  {arch:<8} {count}")
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected numbers such as 64,128") from None
