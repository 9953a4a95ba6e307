"""The arguments of a kernel are one struct, written down in Python and in CUDA."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cuflash.families import sm80, sm90, standard
from cuflash.families.backward import sm80 as sm80_backward
from cuflash.families.backward import sm90 as sm90_backward
from cuflash.families.backward import turns
from cuflash.fp8 import gpu_quantizer
from cuflash.runtime import source

SIZES = {"i64": 8, "int": 4, "u32": 4, "float": 4, "TensorMap": 128, "Input": 32}
ALIGNMENTS = {"TensorMap": 64, "Input": 8}  # where it is not the size
STRUCTS = [
    pytest.param("standard/softmax.cu", "Chunk", standard._CHUNK, id="standard"),
    pytest.param("sm80/forward.cu", "Arguments", sm80._ARGUMENTS, id="sm80"),
    pytest.param(
        "sm80/backward_config.cuh", "Arguments", sm80_backward._ARGUMENTS, id="sm80 backward"
    ),
    pytest.param("sm90/config.cuh", "Arguments", sm90.ARGUMENTS, id="sm90"),
    pytest.param(
        "sm90_backward/config.cuh", "Arguments", sm90_backward.ARGUMENTS, id="sm90 backward"
    ),
    pytest.param("fp8/problem.cuh", "Arguments", gpu_quantizer.ARGUMENTS, id="quantize"),
]


def cuda_fields(file: str, struct: str) -> dict[str, tuple[int, int]]:
    """Offset and size of each field of a struct, by C++'s rules of alignment."""
    text = re.sub(r"//.*", "", source.read(file))
    body = re.search(rf"struct (?:__align__\(64\) )?{struct} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    fields, offset = {}, 0
    for declaration in filter(None, (part.strip() for part in body[1].split(";"))):
        kind = re.match(r"(?:const )?(?:unsigned )?(\w+)", declaration)
        assert kind is not None, declaration
        for declarator in declaration[kind.end() :].split(","):
            name = re.search(r"(\w+)(?:\[(\d+)\])?$", declarator)
            assert name is not None, declaration
            item = 8 if "*" in declarator else SIZES[kind[1]]
            alignment = ALIGNMENTS.get(kind[1], item)
            offset = -(-offset // alignment) * alignment
            fields[name[1]] = (offset, item * int(name[2] or 1))
            offset += fields[name[1]][1]
    return fields


@pytest.mark.parametrize(("file", "struct", "dtype"), STRUCTS)
def test_both_sides_agree_on_every_field(file: str, struct: str, dtype: np.dtype) -> None:
    assert dtype.names is not None
    assert dtype.fields is not None
    layout = {name: (dtype.fields[name][1], dtype[name].itemsize) for name in dtype.names}
    assert layout == cuda_fields(file, struct)


@pytest.mark.parametrize(("file", "struct", "dtype"), STRUCTS)
def test_both_sides_agree_on_the_size(file: str, struct: str, dtype: np.dtype) -> None:
    asserted = re.search(rf"static_assert\(sizeof\({struct}\) == (\d+)", source.read(file))
    assert asserted is not None
    assert int(asserted[1]) == dtype.itemsize


def test_both_sides_agree_on_the_first_turn() -> None:
    found = re.search(r"constexpr int FIRST_TURN = (\d+);", source.read("common/turns.cuh"))
    assert found is not None
    assert 4 * int(found[1]) == turns.counters_size(0)
