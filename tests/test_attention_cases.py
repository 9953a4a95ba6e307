"""Cases that broke other libraries, on every backend and every GPU kernel family."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import backward_trials
import numpy as np
import pytest
from attention_cases import (
    Backend,
    Case,
    CudaBackend,
    NumpyBackend,
    forward_call,
    has_forward,
    load_cases,
    run,
)
from case_expectations import check_fields, judge
from case_procedures import PROCEDURES, fork_safety_on_cpu
from case_recipes import LAYOUTS, lay_out, read_values

import cuflash

GPU_FAMILIES = ["standard", "sm80"]
# What a family does not take, so that another runs it; it has to say so.
REFUSED = {
    "sm80": {
        "case-08-block-sparse-empty-row": "mask",
        "case-09-first-tile-fully-masked": "mask",
        "case-27-non-contiguous-input": "last axis",
    }
}
CASES, NOT_YET = load_cases()
CASE_COUNT = 72
GIB = 2**30
SHAPE = (2, 37, 3, 64)
ANY_LAYOUT: list[dict[str, Any]] = [
    {"kind": "contiguous"},
    {"kind": "packed_qkv"},
    {"kind": "transposed", "stored_as": "BHSD"},
    {"kind": "transposed", "stored_as": "BHDS"},
    {"kind": "fused_rows", "pitch": 640, "offset": 256},
    {"kind": "row_pitch", "pitch": 193},
    {"kind": "batch_pitch", "pitch": 8000},
    {"kind": "strided_last", "step": 2},
    {"kind": "reversed", "axis": "seq"},
    {"kind": "reversed", "axis": "channel"},
    {"kind": "broadcast", "axes": ["batch", "head"]},
    {"kind": "offset_elements", "offset": 1},
    {"kind": "guarded", "before": 3, "after": 5, "fill": "nan"},
]


def is_procedure(case: Case) -> bool:
    """Whether a case is steps to take, at least in part."""
    return "procedure" in [x["type"] for x in (case["expect"], *case.get("also", []))]


def cases_of(backend: str, procedure: bool = False) -> list[Any]:
    """Test parameters: the cases for a backend that are, or are not, procedures; but for those
    that are about gradients alone.
    """
    return [
        pytest.param(case, id=case["id"])
        for case in CASES
        if backend in case["backends"] and is_procedure(case) == procedure and has_forward(case)
    ]


@pytest.fixture(scope="module")
def cuda() -> Iterator[CudaBackend]:
    """The current CUDA device; what the tests leave in the memory pool is given back."""
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    yield CudaBackend()
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(params=["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    if request.param == "numpy":
        return NumpyBackend()
    chosen: CudaBackend = request.getfixturevalue("cuda")
    return chosen


# --- the case file ------------------------------------------------------------------------------


def test_every_case_is_run_or_listed_as_not_yet() -> None:
    ids = [case["id"] for case in CASES] + list(NOT_YET)
    numbers = sorted(int(x.split("-")[1]) for x in ids)
    assert numbers == list(range(1, CASE_COUNT + 1))
    assert all(NOT_YET.values()), "each case that is not run says why"


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
def test_every_field_of_a_case_is_understood(case: Case) -> None:
    """A field that no code knows would make its case pass unread."""
    assert set(case["backends"]) <= {"numpy", "cuda"}
    assert set(case.get("known", {})) <= {"out", "lse"}
    judged = [case, case.get("forward", case)]
    for expectation in [x for part in judged for x in (part["expect"], *part.get("also", []))]:
        check_fields(expectation)
    assert is_procedure(case) == (case["id"] in PROCEDURES | backward_trials.PROCEDURES)
    assert set(case.get("needs", [])) <= ({"two_gpus"} if is_procedure(case) else set())


# --- the cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases_of("numpy"))
def test_case_on_numpy(case: Case) -> None:
    judge(case, NumpyBackend(), "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize("case", cases_of("cuda"))
def test_case_on_cuda(case: Case, family: str, cuda: CudaBackend) -> None:
    free, _ = cuda.cupy.cuda.runtime.memGetInfo()
    if free < case.get("memory_gib", 0) * GIB:
        pytest.skip(f"needs {case['memory_gib']} GiB of device memory; {free / GIB:.1f} are free")
    reason = REFUSED.get(family, {}).get(case["id"])
    if reason is None:
        judge(case, cuda, family)
        return
    error = run(forward_call(case), cuda, family).error
    assert isinstance(error, NotImplementedError)
    assert reason in str(error)


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize("case", cases_of("cuda", procedure=True))
def test_procedure_on_cuda(case: Case, family: str, cuda: CudaBackend) -> None:
    PROCEDURES[case["id"]](case, family)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_forked_child_attends_on_the_cpu() -> None:
    (case,) = [case for case in CASES if case["id"] == "case-59-fork-safety"]
    fork_safety_on_cpu(case)


# --- the checks themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("case", cases_of("numpy"))
def test_a_wrong_result_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_seven(q: Any, k: Any, v: Any, **options: Any) -> Any:
        batch, seq, heads, _ = q.shape
        out = np.full((batch, seq, heads, v.shape[-1]), 7, q.dtype)
        lse = np.full((batch, heads, seq), 7, np.float32)
        return (out, lse) if options.get("return_lse") else out

    if forward_call(case).out_shape[0] == 0:
        pytest.skip("an empty result can't be wrong")
    monkeypatch.setattr(cuflash, "attention", all_seven)
    with pytest.raises(AssertionError, match=re.escape(case["id"])):
        judge(case, NumpyBackend(), "auto")


@pytest.mark.parametrize("case", cases_of("numpy"))
def test_an_unexpected_error_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("q, k, v, heads, head_dim, dropout_p, dtype")

    monkeypatch.setattr(cuflash, "attention", broken)
    with pytest.raises(AssertionError, match=re.escape(case["id"])):
        judge(case, NumpyBackend(), "auto")


# --- what the cases say beside their expectations -----------------------------------------------


def test_eight_bit_integers_are_refused(backend: Backend) -> None:
    """Case 63 replaces the dtype of its case, which leaves k in bfloat16; here all three agree."""
    spec = {"shape": [1, 8, 1, 64], "values": {"recipe": "normal", "std": 1.0}}
    values = {name: read_values(name, spec, "int8", 1063) for name in "qkv"}
    arrays = backend.place(lay_out(values, {}))
    with pytest.raises((ValueError, TypeError), match=r"\b[qkv]\b.*int8"):
        cuflash.attention(arrays["q"], arrays["k"], arrays["v"], layout="bshd")


@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_any_type_of_number_is_taken(option: str, backend: Backend) -> None:
    """Case 61 names the types but gives only some of them, and only for scale."""
    spec = {"shape": [1, 40, 2, 64], "values": {"recipe": "normal", "std": 1.0}}
    values = {name: read_values(name, spec, "float16", 1061) for name in "qkv"}
    arrays = backend.place(lay_out(values, {}))
    value = 0 if option == "dropout_p" else 1
    kinds = (int, float, np.float16, np.float32, np.float64, np.int64, np.asarray)
    options: list[dict[str, Any]] = [{option: kind(value)} for kind in kinds]
    results = [
        backend.to_host(cuflash.attention(**arrays, layout="bshd", **given)) for given in options
    ]
    assert all(np.array_equal(result, results[0]) for result in results)


# --- layouts ------------------------------------------------------------------------------------


def layout_case(layout: dict[str, Any]) -> Case:
    """A case whose three inputs all have one layout."""
    spec = {"shape": SHAPE, "values": {"recipe": "normal"}, "layout": layout}
    close = {"type": "close", "atol": 0.002, "rtol": 0.004, "targets": ["out"]}
    refused = {
        "type": "raises",
        "error": "ValueError",
        "accept": ["ValueError"],
        "mentions": ["q", "k", "v"],
    }
    return {
        "id": f"layout {layout}",
        "op": "attention",
        "dtype": "float16",
        "seed": 1,
        "inputs": dict.fromkeys("qkv", spec),
        "options": {"causal": True},
        "expect": {"type": "any_of", "of": [close, refused]},
        "why": "The values are the same however they are stored.",
    }


@pytest.mark.parametrize("layout", ANY_LAYOUT, ids=str)
def test_a_layout_changes_the_storage_alone(layout: dict[str, Any]) -> None:
    plain = forward_call(layout_case({"kind": "contiguous"})).arrays
    for name, stored in forward_call(layout_case(layout)).arrays.items():
        values = plain[name].view
        if layout["kind"] == "broadcast":
            values = np.broadcast_to(values[:1, :, :1], SHAPE)
        assert np.array_equal(stored.view, values)
        assert np.shares_memory(stored.view, stored.buffer)
        assert stored.buffer.flags.c_contiguous
        is_plain = stored.view.flags.c_contiguous and stored.buffer.size == stored.view.size
        assert is_plain == (layout["kind"] == "contiguous")


def test_every_layout_is_tried() -> None:
    assert {layout["kind"] for layout in ANY_LAYOUT} == {"packed_qkv", *LAYOUTS}


@pytest.mark.parametrize("layout", ANY_LAYOUT, ids=str)
def test_attention_of_a_layout(layout: dict[str, Any], backend: Backend) -> None:
    judge(layout_case(layout), backend, "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ANY_LAYOUT, ids=str)
def test_a_device_sees_the_same_view(layout: dict[str, Any], cuda: CudaBackend) -> None:
    host = forward_call(layout_case(layout)).arrays
    for name, placed in cuda.place(host).items():
        assert placed.strides == host[name].view.strides
        assert np.array_equal(cuda.to_host(placed), host[name].view)
