"""Arrays of other libraries are viewed, not copied; what can't be viewed is refused by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparison import DTYPES, Array, assert_attention, values_of
from dlpack_exporter import BFLOAT, COMPLEX, FLOAT, Exporter
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash.arrays import ArrayInfo, adopt, contiguous_strides, describe, may_overlap, memory_range

FORMS = pytest.mark.parametrize("versioned", [True, False], ids=["DLPack 1.0", "DLPack 0.8"])


class Foreign:
    """A NumPy array behind a library that has `__dlpack__` and `__dlpack_device__` alone."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OnGpu:
    """A tensor in GPU memory, where there is none."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("the memory of this stand-in must not be asked for")


class OnGpuByInterface:
    """The same, through `__cuda_array_interface__`."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012 - read by attribute alone


def bfloat16_bits(count: int) -> Array:
    """Values 0, 1, 2... in bfloat16, as their bits."""
    return np.arange(count, dtype=np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


# --- DLPack, CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, bool, np.int32])
def test_a_foreign_array_is_viewed(dtype: Any) -> None:
    values = np.ones((4, 6), dtype)[::2, ::-1]
    view = adopt("q", Foreign(values))
    assert type(view) is np.ndarray
    assert view.dtype == dtype
    assert (view.shape, view.strides) == (values.shape, values.strides)
    assert view.ctypes.data == values.ctypes.data


def test_attention_takes_foreign_arrays_and_fills_one() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 8)).astype(np.float16)
    mask = rng.random((9, 9)) < 0.7
    out = Foreign(np.full_like(q, np.nan))
    lens = np.array([9])
    result, lse = cuflash.attention(
        *map(Foreign, (q, k, v)), mask=Foreign(mask), kv_lens=Foreign(lens), out=out,
        return_lse=True,
    )  # fmt: skip
    assert result is out
    assert np.array_equal(out.array, cuflash.attention(q, k, v, mask=mask))
    assert type(lse) is np.ndarray
    assert type(cuflash.attention(*map(Foreign, (q, k, v)))) is np.ndarray


@pytest.mark.parametrize("code", [FLOAT, BFLOAT], ids=["float16", "bfloat16"])
def test_out_may_be_a_foreign_array(code: int) -> None:
    memory = np.full((5, 4), 0xFFFF, np.uint16)  # NaN
    out = Exporter(memory, code)
    q = np.ones((5, 4), np.float16 if code == FLOAT else ml_dtypes.bfloat16)
    assert cuflash.attention(q, q, q, out=out) is out
    assert np.array_equal(memory.view(q.dtype), q)


def test_exports_of_the_old_form_are_alike() -> None:
    """It can't say whether a tensor may be written; NumPy takes it not to, as JAX's may not be."""
    float16, bfloat16 = (
        adopt("out", Exporter(bfloat16_bits(12), code, versioned=False)) for code in (FLOAT, BFLOAT)
    )
    assert float16.flags.writeable == bfloat16.flags.writeable


BFLOAT16_TENSORS: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
    "contiguous": (lambda bits: bits.reshape(3, 4), {}),
    "strides left out": (lambda bits: bits.reshape(3, 4), {"null_strides": True}),
    "transposed": (lambda bits: bits.reshape(3, 4).T, {}),
    "stepped, offset": (lambda bits: bits.reshape(3, 4)[1:, ::2], {"byte_offset": 8}),
    "offset without strides": (lambda bits: bits[5:], {"byte_offset": 10, "null_strides": True}),
    "reversed": (lambda bits: bits.reshape(3, 4)[::-1, 2:], {"byte_offset": 4}),
    "broadcast": (lambda bits: as_strided(bits[2:], (5, 3), (0, 2)), {}),
    "one axis": (lambda bits: bits[3:], {}),
    "four axes": (lambda bits: bits.reshape(1, 3, 2, 2).swapaxes(1, 2), {}),
    "empty": (lambda bits: bits[:0].reshape(0, 4), {}),
}


@FORMS
@pytest.mark.parametrize(("part", "form"), BFLOAT16_TENSORS.values(), ids=BFLOAT16_TENSORS)
def test_bfloat16_is_viewed(
    part: Callable[[Array], Array], form: dict[str, Any], versioned: bool
) -> None:
    tensor = part(bfloat16_bits(12))
    view = adopt("k", Exporter(tensor, BFLOAT, versioned=versioned, **form))
    assert type(view) is np.ndarray
    assert view.dtype == ml_dtypes.bfloat16
    assert view.shape == tensor.shape
    assert np.array_equal(view.view(np.uint16), tensor)
    if tensor.size:
        assert view.ctypes.data == tensor.ctypes.data
        assert view.strides == tensor.strides
        tensor[(-1,) * view.ndim] = np.array(99, ml_dtypes.bfloat16).view(np.uint16)
        assert view[(-1,) * view.ndim] == 99


def test_the_read_only_flag_is_kept() -> None:
    tensor = Exporter(bfloat16_bits(12).reshape(3, 4), BFLOAT, read_only=True)
    assert not adopt("q", tensor).flags.writeable
    q = np.zeros((3, 4), ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="out: got a read-only array"):
        cuflash.attention(q, q, q, out=tensor)


@FORMS
@pytest.mark.parametrize("code", [FLOAT, BFLOAT], ids=["float16", "bfloat16"])
def test_an_export_is_freed_when_the_last_view_dies(code: int, versioned: bool) -> None:
    exporter = Exporter(bfloat16_bits(12).reshape(3, 4), code, versioned=versioned)
    view = adopt("v", exporter)
    assert exporter.alive == 1
    part = view[1:, ::2]
    exporter.array = np.zeros(0, np.uint16)  # the memory lives by the export alone
    del view
    gc.collect()
    assert exporter.alive == 1, "a view of the view is still there"
    assert np.array_equal(part.view(np.uint16), bfloat16_bits(12).reshape(3, 4)[1:, ::2])
    del part
    gc.collect()
    assert exporter.alive == 0
    assert exporter.exported >= 1


@FORMS
def test_attention_holds_no_export_after_the_call(versioned: bool) -> None:
    bits = bfloat16_bits(24).reshape(6, 4)
    q = Exporter(bits, BFLOAT, versioned=versioned)
    out = Exporter(np.zeros((6, 4), np.uint16), BFLOAT)
    assert cuflash.attention(q, q, q, out=out) is out
    expected = cuflash.attention(*[bits.view(ml_dtypes.bfloat16)] * 3)
    assert np.array_equal(out.array, expected.view(np.uint16))
    gc.collect()
    assert q.alive == out.alive == 0


@FORMS
def test_an_unknown_type_is_refused_and_freed(versioned: bool) -> None:
    exporter = Exporter(np.zeros((3, 4), np.uint16), COMPLEX, versioned=versioned)
    with pytest.raises(TypeError, match=r"^bias: .*Exporter could not be taken without a copy"):
        adopt("bias", exporter)
    gc.collect()
    assert exporter.alive == 0
    assert exporter.exported >= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_are_taken_without_a_copy(dtype: str) -> None:
    torch: Any = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    host = [values_of(rng, (2, h, 35, 16), DTYPES[dtype]) for h in (4, 2, 2)]
    q, k, v = (torch.from_numpy(a.astype(np.float64)).to(getattr(torch, dtype)) for a in host)
    assert adopt("q", q).ctypes.data == q.data_ptr()
    out = torch.full_like(q, float("nan"))
    expected = cuflash.attention(*host, causal=True)
    assert cuflash.attention(q, k, v, causal=True, out=out) is out
    assert np.array_equal(out.double().numpy(), expected.astype(np.float64))
    views = (array.transpose(1, 2) for array in (q, k, v))
    by_view = cuflash.attention(*views, causal=True, layout="bshd")
    assert_attention(by_view.swapaxes(1, 2), None, *host, causal=True)
    needs_gradient = q.detach().clone().requires_grad_()
    with pytest.raises(TypeError, match=r"^bias: .*torch.*without a copy"):
        cuflash.attention(q, k, v, bias=needs_gradient)


# --- GPU memory, without a GPU ------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [OnGpu(), OnGpuByInterface()], ids=["DLPack", "interface"])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "out", "q_lens", "kv_lens"])
def test_without_cupy_the_message_names_the_argument(
    name: str, tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    arrays: dict[str, Any] = dict.fromkeys("qkv", np.ones((3, 4), np.float16))
    with pytest.raises(TypeError, match=f"^{name}: got an array in GPU memory, .* needs CuPy: pip"):
        cuflash.attention(**(arrays | {name: tensor}))


# --- descriptions -------------------------------------------------------------------------------


def test_describe_counts_strides_in_elements() -> None:
    buffer = np.zeros((8, 10), np.float32)
    info = describe("q", buffer[::2, ::-3])
    assert info == ArrayInfo((4, 4), "float32", "cpu", (20, -3), info.aligned)
    assert not info.on_gpu
    assert describe("q", info) is info


def test_describe_leaves_strides_of_single_elements_out() -> None:
    """They lead nowhere, so that two such arrays are of one kind."""
    buffer = np.zeros(99, np.float16)
    found = np.lib.stride_tricks.as_strided(buffer, (1, 3, 1, 4), (22, 8, 6, 2))
    assert describe("q", found).strides == contiguous_strides((1, 3, 1, 4))
    apart = np.lib.stride_tricks.as_strided(buffer, (1, 3, 1, 4), (22, 16, 6, 2))
    assert describe("q", apart).strides == (11, 8, 3, 1)


@pytest.mark.parametrize("offset", range(9))
def test_describe_tells_16_byte_alignment(offset: int) -> None:
    buffer = np.zeros(64, np.uint8)
    start = -buffer.ctypes.data % 16
    array = buffer[start + 2 * offset :][:16].view(np.float16)
    assert describe("q", array).aligned == (offset % 8 == 0)


def test_a_stand_in_is_contiguous_unless_told() -> None:
    assert ArrayInfo((2, 3, 4)).strides == contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert ArrayInfo((2, 0, 4)).strides == (4, 4, 1)
    assert ArrayInfo((2, 3), strides=(1, 2)).strides == (1, 2)
    assert ArrayInfo(np.ones((2, 3)).shape, device="cuda:1").on_gpu


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"shape": (-1, 8)}, "shape"),
        ({"shape": (2, 3, 4), "strides": (4, 1)}, "strides"),
        ({"shape": (2, 3), "device": "gpu"}, "device"),
        ({"shape": (2, 3), "device": "cuda"}, "device"),
    ],
    ids=str,
)
def test_a_stand_in_that_describes_no_array(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ArrayInfo(**fields)


# --- shared memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "overlap"),
    [
        (np.s_[0:4], np.s_[4:8], False),
        (np.s_[0:5], np.s_[4:8], True),
        (np.s_[::2], np.s_[1::2], False),
        (np.s_[::-2], np.s_[::3], True),
        (np.s_[7::-1], np.s_[8:], False),
        (np.s_[3:3], np.s_[:], False),
    ],
    ids=str,
)
def test_overlap_of_views(a: Any, b: Any, overlap: bool) -> None:
    buffer = np.zeros((16, 3), np.float32)
    assert may_overlap(buffer[a], buffer[b]) is overlap
    assert may_overlap(buffer[b].T, buffer[a]) is overlap


def test_memory_range_covers_every_stride() -> None:
    buffer = np.zeros((4, 6), np.float32)
    start = buffer.ctypes.data
    assert memory_range(buffer) == (start, start + buffer.nbytes)
    assert memory_range(buffer[::-1, 5:0:-2]) == (start + 4, start + buffer.nbytes)
    assert memory_range(np.broadcast_to(buffer[:1, :1], (9, 9))) == (start, start + 4)


def test_out_may_lie_between_the_rows_of_an_input() -> None:
    buffer = np.ones((2, 8, 4), np.float32)
    q, out = buffer[:, ::2], buffer[:, 1::2]
    expected = cuflash.attention(q.copy(), q.copy(), q.copy())
    assert cuflash.attention(q, q, q, out=out) is out
    assert np.array_equal(out, expected)
