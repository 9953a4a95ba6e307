"""What the commands share: the form of their parsers, lists of words, examples, JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any


def add_command(
    commands: Any, name: str, function: Callable[..., int], summary: str, *examples: str
) -> argparse.ArgumentParser:
    """A command's parser, with a description, examples and ``--json``."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=list_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=function)
    return command


def list_examples(*lines: str) -> str:
    """The end of a help text."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of these words, with commas between them, each once."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"got {word!r}; expected of {', '.join(allowed)}")
        return found

    return parse


def as_json(value: Any) -> str:
    """JSON for people and programs."""
    return json.dumps(value, indent=2)
