"""Where the cycles of a main loop go, and what limits it: a model, not a measurement.

For one tile of query rows by keys, on one multiprocessor, over all loops of a kernel:

    MMA    = operations of the products / operations a clock
    MUFU   = instructions of the special function unit x warps x 32 lanes / lanes a clock
    issue  = instructions x warps / schedulers
    shared = bytes of operands read, and written by instructions, / bytes a clock

Instructions are those of `hot_path`. What copies write into shared memory is not counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from cuflash.runtime.ptxas import Resources

from .configurations import Configuration
from .hot_path import main_loop
from .sass import opcode

_LANES, _SCHEDULERS, _SHARED_BYTES = 16, 4, 128  # a clock, of every architecture here
_NEAR = 0.95  # of the longest, from which another limits as well


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one has: operations a clock of 16-bit products with float32 sums, by the instruction
    that our kernel uses; shared memory in bytes; threads.
    """

    mma: int
    shared_memory: int
    threads: int


# `mma` from peak rates as published, by multiprocessors and clock. 8.6, 8.9 and 12.0: GeForce;
# others of them (A10, A40, L40S, RTX PRO) have twice that. mma.sync on 9.0: 62 % of wgmma, as
# measured; on 10.0 assumed to be as on 8.0.
_MULTIPROCESSORS = {
    (8, 0): Multiprocessor(2048, 164 << 10, 2048),
    (8, 6): Multiprocessor(512, 100 << 10, 1536),
    (8, 9): Multiprocessor(512, 100 << 10, 1536),
    (9, 0): Multiprocessor(4096, 228 << 10, 2048),
    (10, 0): Multiprocessor(2048, 228 << 10, 2048),
    (12, 0): Multiprocessor(512, 100 << 10, 1536),
}
_MMA_SYNC_ON_9_0 = 2540
_REGISTERS = 65536
_OF_SYSTEM = 1024  # bytes of shared memory of each block

_CLASSES = {
    "products": ("HMMA", "HGMMA", "QGMMA", "IGMMA"),
    "special": ("MUFU",),
    "float": ("FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "FSEL", "HADD2", "HMUL2", "HFMA2"),
    "conversions": ("F2F", "F2FP", "I2F", "I2FP", "F2I"),
    "shared memory": ("LDS", "LDSM", "STS", "STSM"),
    "copies": ("LDGSTS", "UTMALDG", "LDGDEPBAR"),
    "barriers": ("BAR", "SYNCS", "WARPSYNC", "WARPGROUP", "DEPBAR", "MEMBAR", "NANOSLEEP"),
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET"),
}
_MATRIX = re.compile(r"[HQI]GMMA\.64x(\d+)x\d+")
_LDSM = re.compile(r"(?:LDSM|STSM)\.16\.MT?88(?:\.(\d))?")
_WIDTH = re.compile(r"(?:LDS|STS)(?:\.U?S?(8|16)|\.(64|128))?")


@dataclass(frozen=True, slots=True)
class Cycles:
    """Of one tile of keys, and what there is most of; instructions are those of a warp."""

    mma: float
    mufu: float
    issue: float
    shared: float
    instructions: float
    mix: dict[str, float]

    @property
    def limiters(self) -> tuple[str, ...]:
        """What takes the most cycles, and what takes nearly as many."""
        parts = {
            "MMA": self.mma, "MUFU": self.mufu, "issue": self.issue, "shared memory": self.shared
        }  # fmt: skip
        most = max(parts.values())
        return tuple(name for name, cycles in parts.items() if cycles >= _NEAR * most)

    @property
    def bound(self) -> float:
        """Part of the rate of products that the limiters leave, at best."""
        return self.mma / max(self.mma, self.mufu, self.issue, self.shared)


def cycles(one: Configuration, assembly: str) -> Cycles:
    """Of the main loop of a kernel.

    Raises
    ------
    ValueError
        Where no loop has the products of a tile.
    """
    counted: dict[str, float] = defaultdict(float)  # of a warp, on the average over loops
    bytes_of_warp = 0.0
    for loop in one.loops:
        for instruction, weight in main_loop(assembly, loop.products, loop.exponentials):
            name, share = opcode(instruction), weight * loop.warps / one.warps
            counted[_class_of(name)] += share
            bytes_of_warp += share * shared_bytes(instruction)
    total = sum(counted.values())
    return Cycles(
        mma=one.operations / rate(one),
        mufu=counted["special"] * one.warps * 32 / _LANES,
        issue=total * one.warps / _SCHEDULERS,
        shared=bytes_of_warp * one.warps / _SHARED_BYTES,
        instructions=total,
        mix=dict(sorted(counted.items())),
    )


def rate(one: Configuration) -> float:
    """Operations a clock of a multiprocessor, for the products of a kernel."""
    if one.module.family.startswith("sm80") and one.capability == (9, 0):
        return _MMA_SYNC_ON_9_0
    return _of(one).mma * (16 // one.bits)


def resident_blocks(one: Configuration, resources: Resources) -> int:
    """How many blocks share a multiprocessor."""
    most = _of(one)
    registers = -(-resources.registers // 8) * 8 * one.threads
    shared = one.shared_memory + resources.static_shared + _OF_SYSTEM
    return min(_REGISTERS // registers, most.shared_memory // shared, most.threads // one.threads)


def shared_bytes(instruction: str) -> float:
    """Bytes of shared memory that an instruction of one warp reads or writes."""
    name = opcode(instruction)
    if matrix := _MATRIX.match(name):
        # A row of either operand has 32 bytes; the first is in registers, or described with the
        # second. A warpgroup reads them together.
        operands = instruction.partition(name)[2].split(",")
        rows = int(matrix[1]) + (64 if "gdesc" in operands[1] else 0)
        return rows * 32 / 4
    if matrices := _LDSM.match(name):
        return 128.0 * int(matrices[1] or 1)
    if name.startswith(("LDS", "STS")) and (width := _WIDTH.match(name)):
        bits = int(width[1] or width[2] or 32)
        return bits / 8 * 32
    return 0.0


def _class_of(name: str) -> str:
    stem = name.partition(".")[0]
    return next((kind for kind, stems in _CLASSES.items() if stem in stems), "other")


def _of(one: Configuration) -> Multiprocessor:
    return _MULTIPROCESSORS[one.capability]
