"""The arguments of the softmax kernel are one struct, written down in Python and in CUDA."""

from __future__ import annotations

import re

import numpy as np

from cuflash.families import standard
from cuflash.runtime import source

SIZES = {"i64": 8, "int": 4, "float": 4}


def cuda_fields() -> dict[str, tuple[int, int]]:
    """Offset and size of each field of `struct Chunk`, by C++'s rules of alignment."""
    text = re.sub(r"//.*", "", source.read("standard/softmax.cu"))
    body = re.search(r"struct Chunk \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    fields, offset = {}, 0
    for declaration in filter(None, (part.strip() for part in body[1].split(";"))):
        kind = re.match(r"(?:const )?(?:unsigned )?(\w+)", declaration)
        assert kind is not None, declaration
        for declarator in declaration[kind.end() :].split(","):
            name = re.search(r"(\w+)(?:\[(\d+)\])?$", declarator)
            assert name is not None, declaration
            item = 8 if "*" in declarator else SIZES[kind[1]]
            offset = -(-offset // item) * item
            fields[name[1]] = (offset, item * int(name[2] or 1))
            offset += fields[name[1]][1]
    return fields


def test_both_sides_agree_on_every_field() -> None:
    python = standard._CHUNK
    assert python.names is not None
    assert python.fields is not None
    layout = {name: (python.fields[name][1], python[name].itemsize) for name in python.names}
    assert layout == cuda_fields()


def test_both_sides_agree_on_the_size() -> None:
    asserted = re.search(
        r"static_assert\(sizeof\(Chunk\) == (\d+)", source.read("standard/softmax.cu")
    )
    assert asserted is not None
    assert int(asserted[1]) == standard._CHUNK.itemsize
    assert standard._CHUNK["softcap"] == np.float32
