"""Machine code as text: disassembly, opcodes and loops."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]+)")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions from `first` up to a branch back to it, which is the one before `last`."""

    first: int
    last: int

    def holds(self, other: Loop) -> bool:
        """Whether another loop lies inside."""
        return self != other and self.first <= other.first and other.last <= self.last


def disassembler() -> str | None:
    """nvdisasm of this Python's packages, else that on the path; None where there is none."""
    wheels = sorted((Path(sys.prefix) / "lib").glob("python*/site-packages/nvidia/*/bin/nvdisasm"))
    return str(wheels[0]) if wheels else shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin.

    Raises
    ------
    RuntimeError
        Where there is no nvdisasm, or it refuses the cubin.
    """
    tool = disassembler()
    if tool is None:
        raise RuntimeError("no nvdisasm: pip install nvidia-cuda-nvdisasm has it")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        found = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"nvdisasm: {found.stderr.strip()}")
    return found.stdout


def opcode(instruction: str) -> str:
    """Such as ``"HMMA.16816.F32"``, without its predicate and operands."""
    found = OPCODE.match(instruction)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Assembly:
    """Instructions in their order, where branches go, and every loop that has a product in it."""

    code: list[str]
    targets: dict[int, int]
    loops: list[Loop]


def parse(assembly: str) -> Assembly:
    """Read what `disassemble` answers with."""
    code: list[str] = []
    labels: dict[str, int] = {}
    branches: dict[int, str] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        if instruction := _INSTRUCTION.match(line):
            if target := _BRANCH.search(instruction[1]):
                branches[len(code)] = target[1]
            code.append(instruction[1])
    targets = {place: labels[name] for place, name in branches.items() if name in labels}
    loops = [Loop(target, place + 1) for place, target in targets.items() if target <= place]
    return Assembly(code, targets, [x for x in loops if products(code[x.first : x.last])])


def products(code: Iterable[str]) -> int:
    """How many instructions multiply matrices."""
    return sum("MMA" in opcode(instruction) for instruction in code)


def inner_loops(assembly: str) -> list[list[str]]:
    """Instructions of each loop that has no other loop with products in it."""
    found = parse(assembly)
    return [
        found.code[loop.first : loop.last]
        for loop in found.loops
        if not any(loop.holds(other) for other in found.loops)
    ]
