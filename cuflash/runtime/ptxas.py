"""What ``ptxas -v`` says of each kernel of a module: registers, spills, shared memory, warnings."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes, by the assembler's own account. Sizes in bytes, a thread or a block.

    Spills of functions that were not inlined count for every kernel of the module: the log does not
    say who calls them.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    static_shared: int = 0
    barriers: int = 0
    warnings: tuple[str, ...] = ()


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_WARNING = re.compile(r"\(C\d+\)|ptxas\b.*\bwarning\b", re.IGNORECASE)
_QUOTED = re.compile(r"'([^']+)'")


def parse(log: str) -> dict[str, Resources]:
    """Resources of each entry function, by name, in the order of the log."""
    entries: dict[str, Resources] = {}
    inner_spills = [0, 0]
    warnings: list[str] = []
    entry = function = ""
    for line in log.splitlines():
        if _WARNING.search(line):
            warnings.append(line.strip())
        elif found := _ENTRY.search(line):
            entry = function = found[1]
            entries[entry] = Resources(registers=0)
        elif found := _FUNCTION.search(line):
            function = found[1]
        elif found := _FRAME.search(line):
            stack, stores, loads = map(int, found.groups())
            if function in entries:
                entries[function] = dataclasses.replace(
                    entries[function], stack=stack, spill_stores=stores, spill_loads=loads
                )
            else:
                inner_spills = [inner_spills[0] + stores, inner_spills[1] + loads]
        elif (found := _REGISTERS.search(line)) and function in entries:
            barriers, shared = _BARRIERS.search(line), _SHARED.search(line)
            entries[function] = dataclasses.replace(
                entries[function],
                registers=int(found[1]),
                barriers=int(barriers[1]) if barriers else 0,
                static_shared=int(shared[1]) if shared else 0,
            )
    return {
        name: dataclasses.replace(
            found,
            spill_stores=found.spill_stores + inner_spills[0],
            spill_loads=found.spill_loads + inner_spills[1],
            warnings=tuple(line for line in warnings if _concerns(line, name, entries)),
        )
        for name, found in entries.items()
    }


def _concerns(line: str, name: str, entries: dict[str, Resources]) -> bool:
    """A warning that names no kernel concerns them all."""
    named = [quoted for quoted in _QUOTED.findall(line) if quoted in entries]
    return not named or name in named
