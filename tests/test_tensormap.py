"""Tensor maps, without a driver: the function that makes them here only takes notes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cuflash.runtime import tensormap
from cuflash.runtime.tensormap import Layout, reasons_against

SHAPE, STRIDES = (2, 3, 100, 64), (19200, 6400, 64, 1)
LAYOUT = Layout.of("float16", SHAPE, STRIDES, (2, 112), 128)
Patch = pytest.MonkeyPatch


class Driver:
    """Takes the place of `cuTensorMapEncodeTiled`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def __call__(self, *given: Any) -> int:
        to, dtype, rank, address, sizes, strides, box, steps, *options = given
        assert to % 64 == 0
        self.calls.append(
            (dtype, rank, address, tuple(sizes), tuple(strides), tuple(box), tuple(steps), options)
        )
        ctypes.memmove(to, bytes([len(self.calls)]) * 128, 128)
        return self.code


@pytest.fixture
def driver(monkeypatch: Patch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(tensormap, "_driver_function", lambda: found)
    tensormap.at.cache_clear()
    yield found
    tensormap.at.cache_clear()


def test_every_argument_reaches_the_driver(driver: Driver) -> None:
    made = tensormap.encode(
        0x7F00, "bfloat16", (64, 3, 100, 2), (384, 128, 38400), (32, 1, 64, 1), 64
    )
    assert made == b"\x01" * 128
    options = [0, 2, 3, 0]  # not interleaved, 64 bytes, 256 bytes, zeros
    expected = (9, 4, 0x7F00, (64, 3, 100, 2), (384, 128, 38400), (32, 1, 64, 1), (1,) * 4, options)
    assert driver.calls == [expected]


def test_large_numbers_reach_the_driver_whole(driver: Driver) -> None:
    address, step = (1 << 47) + 16, (1 << 40) - 16
    tensormap.encode(address, "float16", (64, 1, 2**32, 1), (16, step, 16), (64, 1, 256, 1), 128)
    dtype, _, found, sizes, strides, box, _, options = driver.calls[0]
    assert (dtype, found, sizes[2], strides[1], box[2]) == (6, address, 2**32, step, 256)
    assert options[1] == 3


def test_the_memory_of_a_map_is_aligned_wherever_it_lies(driver: Driver) -> None:
    made = [tensormap.encode(i, "float16", SHAPE, STRIDES[:3], SHAPE, 128) for i in range(50)]
    assert made == [bytes([i + 1]) * 128 for i in range(50)]


def test_a_refusal_of_the_driver_names_all_that_it_was_given(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(RuntimeError) as caught:
        tensormap.encode(0xABC0, "float16", (64, 3, 100, 2), (384, 128, 38400), (64, 1, 80, 1), 128)
    message = str(caught.value)
    for part in ("cuTensorMapEncodeTiled: error 1 ", "0xabc0", "float16", "(64, 3, 100, 2)",
                 "(384, 128, 38400)", "(64, 1, 80, 1)", "swizzle 128"):  # fmt: skip
        assert part in message


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), AttributeError("old")])
def test_without_the_function_a_new_driver_is_asked_for(
    error: Exception, monkeypatch: Patch
) -> None:
    asked = []

    class Library:
        def __getattr__(self, name: str) -> None:
            raise error

    def load(name: str) -> Library:
        asked.append(name)
        if isinstance(error, OSError):
            raise error
        return Library()

    monkeypatch.setattr(ctypes, "CDLL", load)
    tensormap._driver_function.cache_clear()
    with pytest.raises(RuntimeError, match=f"need a driver of CUDA 12 or newer .{error}"):
        tensormap.encode(16, "float16", SHAPE, STRIDES[:3], SHAPE, 128)
    assert asked == ["libcuda.so.1"]


def test_the_library_is_loaded_once_and_its_function_typed(monkeypatch: Patch) -> None:
    seen: list[tuple[int, ...]] = []
    pointer = ctypes.c_void_p
    numbers, sizes = ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64)

    # With C types of its own: an address that was passed as a C int would lose its upper half.
    @ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, numbers, numbers, pointer, sizes, sizes,
        ctypes.POINTER(numbers), ctypes.POINTER(numbers), numbers, numbers, numbers, numbers,
    )  # fmt: skip
    def native(*given: Any) -> int:
        seen.append((given[3], given[4][2], given[5][2], given[6][0], given[9]))
        return 0

    class Library:
        cuTensorMapEncodeTiled = native

    loads: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loads.append(name) or Library())
    tensormap._driver_function.cache_clear()
    try:
        for _ in range(2):
            tensormap.encode(
                1 << 46, "float16", (64, 3, 100, 2), (16, 32, 1 << 39), (64, 1, 8, 1), 128
            )
    finally:
        tensormap._driver_function.cache_clear()
    assert seen == [(1 << 46, 100, 1 << 39, 64, 3)] * 2
    assert loads == ["libcuda.so.1"]


# --- layouts --------------------------------------------------------------------------------------


def test_dimensions_are_columns_heads_rows_batch() -> None:
    assert LAYOUT.sizes == (64, 3, 100, 2)
    assert LAYOUT.byte_strides == (12800, 128, 38400)
    assert LAYOUT.box == (64, 2, 112, 1)
    narrow = Layout.of("bfloat16", (2, 3, 100, 96), (96, 192, 576, 1), (1, 64), 64)
    assert (narrow.byte_strides, narrow.box) == ((384, 1152, 192), (32, 1, 64, 1))
    assert (narrow.dtype, narrow.swizzle_bytes) == ("bfloat16", 64)


@pytest.mark.parametrize("step", [0, 1, 7, -64, 1 << 50])
def test_an_axis_of_one_element_gets_a_stride_that_the_driver_takes(step: int) -> None:
    for axis, at in ((0, 2), (1, 0), (2, 1)):
        shape, strides = list(SHAPE), list(STRIDES)
        shape[axis], strides[axis] = 1, step
        assert reasons_against(tuple(shape), tuple(strides), True) == []  # type: ignore[arg-type]
        layout = Layout.of("float16", tuple(shape), tuple(strides), (1, 64), 128)  # type: ignore[arg-type]
        assert layout.byte_strides[at] == 128
        others = [n for i, n in enumerate(layout.byte_strides) if i != at]
        assert others == [n for i, n in enumerate(LAYOUT.byte_strides) if i != at]


def test_a_row_of_few_columns_is_rounded_up_for_its_stride() -> None:
    layout = Layout.of("float16", (1, 1, 1, 4), (0, 0, 0, 1), (1, 64), 128)
    assert layout.byte_strides == (16, 16, 16)


def test_a_map_is_made_once_for_each_address_and_layout(driver: Driver) -> None:
    first = tensormap.at(LAYOUT, 0x1000)
    assert tensormap.at(LAYOUT, 0x1000) is first
    assert tensormap.at(LAYOUT, 0x2000) != first
    other = Layout.of("float16", SHAPE, STRIDES, (1, 64), 128)
    assert tensormap.at(other, 0x1000) != first
    assert [(call[2], call[5][2]) for call in driver.calls] == [
        (0x1000, 112), (0x2000, 112), (0x1000, 64),
    ]  # fmt: skip
    assert driver.calls[0][3:5] == ((64, 3, 100, 2), (12800, 128, 38400))
    assert tensormap.at.cache_info().maxsize == 4096


def test_a_map_that_failed_is_tried_again(driver: Driver) -> None:
    driver.code = 1
    for _ in range(2):
        with pytest.raises(RuntimeError):
            tensormap.at(LAYOUT, 0x1000)
    driver.code = 0
    assert tensormap.at(LAYOUT, 0x1000) == b"\x03" * 128


# --- what no map can describe ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "aligned"),
    [
        (SHAPE, STRIDES, True),
        ((2, 3, 100, 64), (19200, 64, 192, 1), True),  # rows beyond heads
        ((2, 3, 100, 64), (64, 128, 384, 1), True),
        ((2, 3, 100, 1), (2400, 800, 8, 77), True),  # a single column
        ((2, 3, 100, 64), ((1 << 39) - 8, 6400, 64, 1), True),
        ((1, 1, 1, 64), (0, 0, 0, 1), True),
    ],
)
def test_what_a_map_can_describe(
    shape: tuple[int, int, int, int], strides: tuple[int, int, int, int], aligned: bool
) -> None:
    assert reasons_against(shape, strides, aligned) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aligned": False}, "needs to start at a multiple of 16 bytes"),
        ({3: 2}, "needs neighbouring elements in its last axis"),
        ({3: -1}, "needs neighbouring elements in its last axis"),
        ({3: 0}, "needs neighbouring elements in its last axis"),
        ({0: 19204}, "steps along batch of a positive multiple of 16 bytes .*, not 38408"),
        ({1: 6401}, "steps along heads of .*, not 12802"),
        ({2: 68}, "steps along seq of .*, not 136"),
        ({2: -64}, "steps along seq of .*, not -128"),
        ({0: 0}, "steps along batch of .*, not 0"),
        ({1: 0}, "steps along heads of .*, not 0"),
        ({2: 0}, "steps along seq of .*, not 0"),
        ({0: 1 << 39}, r"steps along batch of .* below 2\^40, not 1099511627776"),
    ],
)
def test_what_no_map_can_describe(changes: dict[Any, Any], reason: str) -> None:
    strides = [changes.get(axis, step) for axis, step in enumerate(STRIDES)]
    found = reasons_against(SHAPE, tuple(strides), changes.get("aligned", True))  # type: ignore[arg-type]
    assert len(found) == 1
    assert re.search(reason, found[0])


def test_every_reason_is_given() -> None:
    found = reasons_against((2**32 + 1, 2, 2, 2), (1, 0, -8, 3), False)
    assert len(found) == 6
    assert found[-1] == f"takes up to 2^32 elements along batch, not {2**32 + 1}"
