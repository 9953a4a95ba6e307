"""`python -m bench report`: result files to the tables of the README, and to figures.

A table stands between ``<!-- bench NAME: FILE -->`` and ``<!-- /bench -->``; without ``: FILE``
nothing has been measured yet. Figures lie beside the file that they are of.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from . import options, plots, tables
from .results import ROOT, load

README = ROOT / "README.md"
_BLOCK = re.compile(
    r"(?P<open><!-- bench (?P<name>[\w-]+)(?:: (?P<file>\S+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /bench -->)",
    re.DOTALL,
)


def add_parser(commands: Any) -> None:
    """The parser of the command."""
    command = options.add_command(
        commands,
        "report",
        run,
        "result files to the tables of the README, and to figures",
        "python -m bench report",
        "python -m bench report --json bench/results/h200.json",
    )
    command.add_argument(
        "--json", type=Path, metavar="FILE",
        help="below the repository; tables whose bench it has are made from it from now on; "
        "default: each from its own file again",
    )  # fmt: skip
    command.add_argument("--readme", type=Path, default=README, metavar="FILE")
    command.add_argument("--no-figures", action="store_true", help="tables alone")


def run(chosen: argparse.Namespace) -> int:
    """Rewrite the tables and draw the figures of every file that one is made from."""
    root = chosen.readme.resolve().parent
    new = None if chosen.json is None else _below(root, chosen.json)
    before = chosen.readme.read_text(encoding="utf-8")
    if not _BLOCK.search(before):
        raise ValueError(f"{chosen.readme}: no place for a table; expected <!-- bench NAME -->")
    after = rewrite(before, root, new)
    if not chosen.no_figures:
        for file in sources(after):
            for path in plots.draw_all(load(root / file), root / file):
                print(path.relative_to(root))
    chosen.readme.write_text(after, encoding="utf-8")
    for name, source, _ in blocks(after):
        print(f"{name:<10} {source or 'nothing measured yet'}")
    return 0


def rewrite(text: str, root: Path, new: str | None = None) -> str:
    """The text with each table made again, from `new` where that record has its bench.

    Raises
    ------
    ValueError
        Naming the table or the file that is wrong.
    """
    has = set() if new is None else set(load(root / new)["benches"])

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        file: str | None = new if name in has else found["file"]
        if file is None:
            return f"<!-- bench {name} -->\n<!-- /bench -->"
        body = tables.render(name, load(root / file))
        for figure in plots.figures_of(name, load(root / file)):
            body += f"\n![{figure}]({plots.path_of(Path(file), figure).as_posix()})\n"
        return f"<!-- bench {name}: {file} -->\n{body}<!-- /bench -->"

    return _BLOCK.sub(block, text)


def blocks(text: str) -> list[tuple[str, str | None, str]]:
    """Name, file and content of each place for a table."""
    return [(found["name"], found["file"], found["body"]) for found in _BLOCK.finditer(text)]


def sources(text: str) -> list[str]:
    """The files that tables are made from, each once."""
    return list(dict.fromkeys(file for _, file, _ in blocks(text) if file))


def _below(root: Path, file: Path) -> str:
    try:
        return file.resolve().relative_to(root).as_posix()
    except ValueError:
        raise ValueError(f"--json: got {file}; expected a file below {root}") from None
