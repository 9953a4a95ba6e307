"""The command line: `cuflash info | explain | check | warmup | cache | fp8-error`, also as
`python -m cuflash`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from . import check, check_gradients, cli_fp8, cli_kernels
from .api import explain
from .arrays import ArrayInfo
from .cli_shared import add_command, as_json, list_examples, words
from .dispatch import AUTO, KERNELS, PREFERENCE
from .environment import VARIABLES, info
from .plan import format_bytes
from .traffic import io_bytes
from .validate import CAUSAL_ALIGNMENTS, CPU_DTYPES, LAYOUTS
from .version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.command(options)
    except BrokenPipeError:  # the reader of our output, such as head, has left
        return 0
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"cuflash {options.name}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuflash",
        description="Exact attention for CuPy and NumPy arrays.",
        epilog=list_examples(
            "cuflash info",
            "cuflash explain --shape 1,32,8192,128 --kv-heads 8 --causal --device 9.0",
            "cuflash check --dtype float16",
            "cuflash warmup --arch sm_80,sm_90",
        )
        + "\n\nenvironment:\n"
        + "\n".join(f"  {name:<18} {meaning}" for name, meaning in VARIABLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    _add_info(commands)
    _add_explain(commands)
    _add_check(commands)
    cli_kernels.add_warmup(commands)
    cli_kernels.add_cache(commands)
    cli_fp8.add_parser(commands)
    return parser


def _add_info(commands: Any) -> None:
    add_command(
        commands,
        "info",
        _info,
        "versions, devices and kernel families of this machine",
        "cuflash info --json",
    )


def _add_explain(commands: Any) -> None:
    command = add_command(
        commands,
        "explain",
        _explain,
        "which family runs a problem, how and why, without running it",
        "cuflash explain --shape 2,8,4096,64 --causal --backward",
        "cuflash explain --shape 1,32,1,128 --kv-heads 8 --kv-len 65536 --device sm_90",
        "cuflash explain --shape 1,32,8192,128 --causal --recipe f8 --device 9.0",
        "cuflash explain --shape 4096,64 --window 256,0 --kernel standard --device 8.0 --json",
    )
    command.add_argument(
        "--shape", type=_shape, required=True, metavar="B,H,S,D", help="of q; leading axes may lack"
    )
    command.add_argument("--kv-heads", type=int, metavar="N", help="default: as q")
    command.add_argument("--kv-len", type=int, metavar="N", help="default: as q")
    command.add_argument("--head-dim-v", type=int, metavar="N", help="default: as q")
    command.add_argument("--dtype", choices=CPU_DTYPES, default="float16")
    command.add_argument("--layout", choices=LAYOUTS, default="bhsd")
    command.add_argument("--causal", action="store_true")
    command.add_argument("--causal-align", choices=CAUSAL_ALIGNMENTS, default="bottom_right")
    command.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="'none' for no bound, as in none,0"
    )
    command.add_argument("--softcap", type=float, metavar="CAP")
    command.add_argument("--scale", type=float, metavar="X")
    command.add_argument("--return-lse", action="store_true")
    command.add_argument("--backward", action="store_true", help="of the gradients instead")
    command.add_argument("--recipe", metavar="NAME", help="of 8 bits, such as f8, instead")
    command.add_argument("--kernel", choices=KERNELS, default="auto")
    command.add_argument(
        "--device",
        metavar="D",
        help="cpu, or a compute capability such as 9.0; default: this machine's",
    )


def _add_check(commands: Any) -> None:
    command = add_command(
        commands,
        "check",
        _check,
        "run every family that this machine can run against the float64 oracle",
        "cuflash check",
        "cuflash check --family reference --dtype float32,bfloat16 --seed 1",
        "cuflash check --backward",
    )
    command.add_argument("--family", type=words(PREFERENCE), default=(), metavar="NAME[,NAME]")
    command.add_argument("--dtype", type=words(CPU_DTYPES), default=(), metavar="NAME[,NAME]")
    command.add_argument("--seed", type=int, help="of the random inputs; default: fresh ones")
    command.add_argument(
        "--backward", action="store_true",
        help="gradients instead; errors are in parts of what rounding can make of an element",
    )  # fmt: skip


def _info(options: argparse.Namespace) -> int:
    found = info()
    print(as_json(found.to_dict()) if options.json else found)
    return 0


def _explain(options: argparse.Namespace) -> int:
    shape = options.shape
    if not 2 <= len(shape) <= 4:
        raise ValueError(f"--shape: got {shape}; expected B,H,S,D, H,S,D or S,D")
    device = options.device or ("cpu" if info().gpu_missing else None)
    place = "cpu" if device == "cpu" else "cuda:0"
    seq_axis, head_axis = (-3, -2) if options.layout == "bshd" and len(shape) > 2 else (-2, -3)
    kv = list(shape)
    kv[seq_axis] = shape[seq_axis] if options.kv_len is None else options.kv_len
    if options.kv_heads is not None:
        if len(shape) < 3:
            raise ValueError(f"--kv-heads: --shape {shape} has no heads axis")
        kv[head_axis] = options.kv_heads
    dim_v = shape[-1] if options.head_dim_v is None else options.head_dim_v
    names = ["layout", "causal", "causal_align", "window", "softcap", "scale", "kernel", "backward"]
    if options.return_lse:  # not an option of the backward pass, which says so
        names.append("return_lse")
    if options.recipe is not None and options.kernel == AUTO:
        names.remove("kernel")  # which attention_fp8 does not take
    plan = explain(
        ArrayInfo(shape, options.dtype, place),
        ArrayInfo(tuple(kv), options.dtype, place),
        ArrayInfo((*kv[:-1], dim_v), options.dtype, place),
        device=device,
        recipe=options.recipe,
        **{name: getattr(options, name) for name in names},
    )
    if options.backward or options.recipe is not None:
        print(as_json(plan.to_dict()) if options.json else plan)
        return 0
    spec = plan.spec
    traffic = io_bytes(
        (spec.batch, spec.q_heads, spec.q_len, spec.head_dim),
        dtype=spec.dtype,
        kv_heads=spec.kv_heads,
        kv_len=spec.kv_len,
        head_dim_v=spec.head_dim_v,
        return_lse=spec.return_lse,
    )
    if options.json:
        print(as_json({**plan.to_dict(), "io_bytes": dataclasses.asdict(traffic)}))
        return 0
    print(plan)
    standard, scores, tiled = (
        format_bytes(n)
        for n in (traffic.standard.total, traffic.standard.scores, traffic.tiled.total)
    )
    print(f"  traffic    standard attention {standard} ({scores} of it scores), tiled {tiled}")
    return 0


def _check(options: argparse.Namespace) -> int:
    results = []
    columns = "{:<10} {:<9} {:<24} {:>10} {:>10}  {}"
    if not options.json:
        print(columns.format("family", "dtype", "problem", "error", "lse error", "result"))
    run = check_gradients.run if options.backward else check.run
    for result in run(options.family, options.dtype, options.seed):
        results.append(result)
        if not options.json:
            errors = ["-" if e is None else f"{e:.1e}" for e in (result.error, result.lse_error)]
            verdict = result.note or ("pass" if result.passed else "FAIL")
            print(
                columns.format(result.family, result.dtype, result.problem, *errors, verdict),
                flush=True,
            )
    failed = [result for result in results if not result.passed]
    if options.json:
        print(as_json([dataclasses.asdict(result) for result in results]))
    elif results:
        places = ", ".join(sorted({result.device for result in results}))
        ran = [result for result in results if not result.refused]
        refused = f", {len(results) - len(ran)} refused" if len(ran) < len(results) else ""
        print(f"{len(ran) - len(failed)} of {len(ran)} passed{refused}, on {places}")
    if not results:
        print(
            "cuflash check: nothing was run; this machine has no device for that selection",
            file=sys.stderr,
        )
        return 2
    return 1 if failed else 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected numbers such as 2,8,4096,64"
        ) from None


def _window(text: str) -> tuple[int | None, ...]:
    try:
        bounds = tuple(None if part.lower() == "none" else int(part) for part in text.split(","))
    except ValueError:
        bounds = ()
    if len(bounds) != 2:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected LEFT,RIGHT such as 256,0 or none,0"
        )
    return bounds
