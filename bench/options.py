"""What the parsers of the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cuflash.cli_shared import list_examples, words
from cuflash.dispatch import KERNELS

from .columns import RECIPES
from .race import Pace
from .runner import run_bench
from .shapes import Problem, select

_PACE = Pace()
NONE = "none"


def add_command(
    commands: Any, name: str, function: Callable[..., int], summary: str, *examples: str
) -> argparse.ArgumentParser:
    """A command's parser, with a description and examples; `function` takes the options."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary.replace("%", "%%"),
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=list_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(function=function)
    return command


def add_bench(
    commands: Any, name: str, bench: Callable[..., None], summary: str, *examples: str
) -> argparse.ArgumentParser:
    """A command that measures: `bench` takes a session and the options."""
    command = add_command(commands, name, run_bench, summary, *examples)
    command.set_defaults(bench=bench, kernel="auto", against=None)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    command.add_argument(
        "--budget", type=positive, metavar="S", help="seconds, after which the rest is left out"
    )
    command.add_argument(
        "--rounds", type=count, default=_PACE.rounds, metavar="N",
        help="windows of a column, whose median counts; beside peers half as many of those far "
        "behind, up to twice as many of the fastest; default: %(default)s",
    )  # fmt: skip
    command.add_argument(
        "--settle-ms", type=positive, default=_PACE.settle_ms, metavar="MS",
        help="of calls before a window, unmeasured; default: %(default)s",
    )  # fmt: skip
    command.add_argument(
        "--window-ms", type=positive, default=_PACE.window_ms, metavar="MS",
        help="of calls that are measured together; default: %(default)s",
    )  # fmt: skip
    return command


def add_selection(
    command: argparse.ArgumentParser, lists: Iterable[str], dtypes: Sequence[str], default: str
) -> None:
    """Which problems."""
    command.add_argument(
        "--list", type=words(tuple(lists)), default=(), metavar="NAME[,NAME]",
        help=f"of {', '.join(lists)}; default: {default}",
    )  # fmt: skip
    command.add_argument(
        "--dims", type=numbers, default=(), metavar="N[,N]", help="head dims; default: the list's"
    )
    command.add_argument(
        "--seqs", type=numbers, default=(), metavar="N[,N]", help="keys; default: the list's"
    )
    command.add_argument(
        "--dtypes", type=words(dtypes), default=(), metavar="NAME[,NAME]",
        help=f"of {', '.join(dtypes)}; default: the list's",
    )  # fmt: skip
    command.add_argument(
        "--masks", type=words(("full", "causal")), default=(), metavar="NAME[,NAME]",
        help="of full, causal; default: the list's",
    )  # fmt: skip


def problems_of(chosen: argparse.Namespace, *default: str) -> list[tuple[str, list[Problem]]]:
    """The lists of `add_selection` by name, and what of each the options leave."""
    return [
        (
            name,
            select(
                name, dims=chosen.dims, seqs=chosen.seqs, dtypes=chosen.dtypes, masks=chosen.masks
            ),
        )
        for name in chosen.list or default
    ]


def add_kernel(command: argparse.ArgumentParser) -> None:
    """Which family."""
    command.add_argument(
        "--kernel", choices=KERNELS, default="auto",
        help="family to insist on; reference runs on the CPU; default: the device's best",
    )  # fmt: skip


def add_peers(command: argparse.ArgumentParser, known: Iterable[str]) -> None:
    """Whom to measure beside."""
    known = tuple(known)
    command.add_argument(
        "--peers", type=words((*known, NONE)), metavar="NAME[,NAME]",
        help=f"of {', '.join(known)}, or {NONE}; default: all that are installed",
    )  # fmt: skip


def add_against(command: argparse.ArgumentParser) -> None:
    """Which other version."""
    command.add_argument(
        "--against", type=source_tree, metavar="DIR",
        help="source tree of another version of cuflash, to be measured in columns of its own",
    )  # fmt: skip


def peers_of(chosen: argparse.Namespace) -> tuple[str, ...] | None:
    """The peers that were chosen; None where nothing was said."""
    return chosen.peers and tuple(name for name in chosen.peers if name != NONE)


def add_recipes(command: argparse.ArgumentParser) -> None:
    """Which ways to quantise."""
    command.add_argument(
        "--recipes", type=words(RECIPES), default=RECIPES[:2], metavar="NAME[,NAME]",
        help=f"of {', '.join(RECIPES)}; default: {','.join(RECIPES[:2])}",
    )  # fmt: skip


def source_tree(text: str) -> str:
    """A folder that has cuflash."""
    folder = Path(text).resolve()
    if not (folder / "cuflash" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a folder with cuflash in it")
    return str(folder)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas between."""
    return tuple(count(word) for word in text.split(","))


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1 on")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number above 0")
    return number
