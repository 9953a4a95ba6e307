"""The cases that broke other libraries' gradients, on every backend and backward family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import backward_trials
import numpy as np
import pytest
from attention_cases import Case, CudaBackend, NumpyBackend, load_cases, takes_gradients
from backward_trials import PROCEDURES, BackwardTrial, judge
from case_expectations import check_fields, judge_trial

import cuflash

GPU_FAMILIES = ["auto", "sm80", "standard"]  # the first: the best that takes a case
# Cases that a family has no kernel for, and how it says so.
REFUSED = {
    "sm80": {
        "case-08-block-sparse-empty-row": "does not take mask",
        "case-27-non-contiguous-input": "needs neighbouring elements in its last axis",
    }
}
CASES = [case for case in load_cases()[0] if takes_gradients(case)]
GIB = 2**30


def cases_of(backend: str) -> list[Any]:
    """Test parameters: the cases for a backend that are calls."""
    return [
        pytest.param(case, id=case["id"])
        for case in CASES
        if backend in case["backends"] and case["id"] not in PROCEDURES
    ]


@pytest.fixture(scope="module")
def cuda() -> Iterator[CudaBackend]:
    """The current CUDA device; what the tests leave in the memory pool is given back."""
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    yield CudaBackend()
    cupy.get_default_memory_pool().free_all_blocks()


def test_there_are_cases() -> None:
    assert len(CASES) == 15
    assert len(cases_of("numpy")) == 11


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_every_field_of_a_case_is_understood(case: Case) -> None:
    assert set(case["inputs"]) == {"q", "k", "v", "dout"}
    assert "known" not in case
    for expectation in (case["expect"], *case.get("also", [])):
        check_fields(expectation)
    if case["id"] not in PROCEDURES:
        assert case["expect"]["type"] != "procedure"


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
    error = BackwardTrial(case, cuda, family).outcome.error
    assert isinstance(error, NotImplementedError)
    assert reason in str(error)


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize("case", [case for case in CASES if case["id"] in PROCEDURES])
@pytest.mark.usefixtures("cuda")
def test_procedure_on_cuda(case: Case, family: str) -> None:
    PROCEDURES[case["id"]](case, family)


# --- the checks themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(3), ids=backward_trials.GRADIENTS)
@pytest.mark.parametrize("case", cases_of("numpy"))
def test_a_wrong_gradient_is_noticed(case: Case, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cuflash.attention_backward

    def with_one_of_sevens(*args: Any, **options: Any) -> Any:
        gradients = list(right(*args, **options))
        gradients[at] = np.full_like(gradients[at], 7)
        return gradients

    monkeypatch.setattr(cuflash, "attention_backward", with_one_of_sevens)
    with pytest.raises(AssertionError, match=re.escape(case["id"])):
        judge(case, NumpyBackend(), "auto")


@pytest.mark.parametrize("case", cases_of("numpy"))
def test_an_unexpected_error_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("q, k, cu_seqlens")

    monkeypatch.setattr(cuflash, "attention_backward", broken)
    with pytest.raises(AssertionError, match=re.escape(case["id"])):
        judge(case, NumpyBackend(), "auto")


REPEATED = {
    "bitwise_repeat": {"type": "bitwise_repeat", "runs": 3, "targets": ["dq", "dk", "dv"]},
    "repeat_runs": {"type": "repeat_runs", "runs": 3},
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_run_that_differs_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that are for a GPU alone use these, so they are tried on another one here."""
    (case,) = [case for case in CASES if case["id"].startswith("case-45")]
    case = {**case, "also": [REPEATED[kind]]}
    judge_trial(BackwardTrial(case, NumpyBackend(), "auto"))
    right, count = cuflash.attention_backward, 0

    def different_at_last(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        dq, dk, dv = right(*args, **options)
        return dq, dk, dv + np.float16(1) if count == 3 else dv

    monkeypatch.setattr(cuflash, "attention_backward", different_at_last)
    with pytest.raises(AssertionError, match="run 2: dv"):
        judge_trial(BackwardTrial(case, NumpyBackend(), "auto"))
    assert count == 3
