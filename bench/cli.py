"""The front door: `python -m bench COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cuflash.cli_shared import list_examples


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(words)
    chosen.words = words
    try:
        status: int = chosen.function(chosen)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        print(f"python -m bench {chosen.name}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    from . import all as everything
    from . import (
        backward,
        compare,
        compile_time,
        forward,
        fp8,
        host,
        io,
        memory,
        quantize,
        report,
        static,
    )

    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measurements of cuflash beside its peers.",
        epilog=list_examples(
            "python -m bench all --json bench/results/h200.json --budget 480",
            "python -m bench forward --dims 128 --seqs 8192 --masks causal",
            "python -m bench report --json bench/results/h200.json",
            "python -m bench compare old.json new.json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    for module in (
        *(everything, forward, backward, fp8, quantize, host, compile_time, memory, io, static),
        *(report, compare),
    ):
        module.add_parser(commands)
    return parser
