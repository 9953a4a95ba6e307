"""Which family runs what, on any device, and how it says so. Nothing here needs a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import ArrayInfo, Plan, dispatch, families, kinds, plan
from cuflash.families import standard
from cuflash.runtime import device as devices
from cuflash.runtime.device import Device, named

CAPABILITIES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
IN_8_BITS = "in 8 bits, which attention_fp8 asks for"


def stand_ins(dtype: str = "float16", place: str = "cuda:0") -> tuple[ArrayInfo, ...]:
    q, kv = (ArrayInfo((2, heads, 100, 64), dtype, place) for heads in (8, 2))
    return q, kv, kv


def explain(device: str, dtype: str = "float16", **options: Any) -> Plan:
    place = "cpu" if device == "cpu" else "cuda:0"
    return cuflash.explain(*stand_ins(dtype, place), device=device, **options)


def takes(family: str, device: str, dtype: str) -> bool:
    """The table of the architecture: whether a family is for such a problem."""
    capability = None if device == "cpu" else float(device)
    if capability is None:
        return family == "reference"
    is_16_bit = dtype in ("float16", "bfloat16")
    return {
        "sm90_fp8": capability == 9.0 and is_16_bit,  # by another function
        "sm90": capability == 9.0 and is_16_bit,
        "sm80": capability >= 8.0 and is_16_bit,
        "standard": True,
        "reference": False,
    }[family]


# --- choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", *CAPABILITIES])
def test_the_first_family_that_takes_a_problem_runs_it(device: str, dtype: str) -> None:
    if dtype == "float64" and device != "cpu":
        with pytest.raises(TypeError, match="q: got dtype float64"):
            explain(device, dtype)
        return
    fitting = [name for name in dispatch.PREFERENCE if takes(name, device, dtype)]
    chosen = next(name for name in fitting if name in families.BUILT)
    plan = explain(device, dtype)
    assert plan.family == chosen
    assert plan.why
    before = dispatch.PREFERENCE[: dispatch.PREFERENCE.index(chosen)]
    assert tuple(refusal.family for refusal in plan.refused) == before
    for family, reasons in ((refusal.family, refusal.reasons) for refusal in plan.refused):
        if takes(family, device, dtype):
            assert reasons == (IN_8_BITS,)
        else:
            assert set(reasons) - {IN_8_BITS}


def test_every_family_has_a_place_in_the_order() -> None:
    assert set(families.BUILT) <= set(dispatch.PREFERENCE)
    assert set(dispatch.KERNELS) == {"auto", *dispatch.PREFERENCE}


@pytest.mark.parametrize(
    ("family", "device", "dtype", "reasons"),
    [
        ("sm90", "8.0", "float16", ["needs compute capability 9.0, not 8.0"]),
        ("sm90", "9.0", "float32", ["takes float16 and bfloat16, not float32"]),
        ("sm80", "7.5", "bfloat16", ["needs compute capability 8.0 or newer, not 7.5"]),
        ("sm80", "cpu", "float16", ["needs a GPU"]),
        ("sm90_fp8", "12.0", "float16", ["not 12.0", IN_8_BITS]),
        ("standard", "cpu", "float32", ["needs a GPU"]),
        ("reference", "9.0", "float16", ["takes NumPy arrays only"]),
    ],
)
def test_a_family_that_is_asked_for_says_why_not(
    family: str, device: str, dtype: str, reasons: list[str]
) -> None:
    with pytest.raises(NotImplementedError) as caught:
        explain(device, dtype, kernel=family)
    message = str(caught.value)
    assert message.startswith(f"kernel={family!r}: no family takes this problem on ")
    assert f"{family}: " in message
    for reason in reasons:
        assert reason in message
    others = set(dispatch.PREFERENCE) - {family, "sm90"}
    assert not any(f"{other}: " in message for other in others)


@pytest.mark.parametrize("device", ["cpu", "7.5", "9.0"])
def test_a_family_that_is_asked_for_and_can_runs(device: str) -> None:
    family = "reference" if device == "cpu" else "standard"
    plan = explain(device, kernel=family)
    assert (plan.family, plan.refused) == (family, ())
    assert plan.why == f"asked for by kernel={family!r}"


@pytest.fixture
def no_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in families.BUILT:
        monkeypatch.setattr(
            families.load(name), "supports", lambda spec, device, name=name: [f"no {name} today"]
        )
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


@pytest.mark.usefixtures("no_family")
@pytest.mark.parametrize("device", ["cpu", "8.0"])
def test_where_every_family_refuses_each_says_why(device: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        explain(device)
    message = str(caught.value)
    assert message.startswith(f"no family takes this problem on {named(device)}. ")
    for family in dispatch.PREFERENCE:
        assert f"{family}: " in message
    for family in families.BUILT:
        assert f"no {family} today" in message


def test_float64_is_refused_for_a_gpu_wherever_the_arrays_lie() -> None:
    with pytest.raises((TypeError, NotImplementedError), match="float64"):
        cuflash.explain(*stand_ins("float64", "cpu"), device="9.0")


# --- plans --------------------------------------------------------------------------------------


def test_a_plan_is_made_once_and_can_be_a_key() -> None:
    plan = explain("9.0", causal=True)
    assert explain("9.0", causal=True) is plan
    assert hash(plan) == hash(explain("9.0", causal=True))
    others = [explain("8.0", causal=True), explain("9.0"), explain("9.0", "bfloat16", causal=True)]
    assert len({plan, *others}) == 4


def test_the_strides_are_part_of_the_problem() -> None:
    plain = ArrayInfo((4, 64), "float16", "cpu")
    strided = ArrayInfo((4, 64), "float16", "cpu", (128, 1))
    unaligned = ArrayInfo((4, 64), "float16", "cpu", aligned=False)
    plans = {cuflash.explain(q, plain, plain) for q in (plain, strided, unaligned)}
    assert len(plans) == 3


@pytest.mark.parametrize("device", ["cpu", "7.5", "9.0"])
def test_a_plan_is_json(device: str) -> None:
    mask = ArrayInfo((100, 100), "bool", "cpu" if device == "cpu" else "cuda:0")
    plan = explain(device, window=(5, 0), mask=mask, q_lens=[1, 2], softcap=3.0)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["family"] == plan.family
    assert read["spec"]["q_heads"] == 8
    assert read["spec"]["mask"] == {"dtype": "bool", "varies": [False, False, True, True]}
    assert read["tiling"]["q_rows"] == plan.tiling.q_rows
    assert read["device"]["name"] == plan.device.name
    assert [refusal["family"] for refusal in read["refused"]] == [r.family for r in plan.refused]
    assert (read["flops"], read["hbm_bytes"]) == (plan.flops, plan.hbm_bytes)


def test_a_printed_plan_shows_the_choice_and_the_problem() -> None:
    options: dict[str, Any] = {
        "causal_align": "top_left",
        "window": (5, 0),
        "softcap": 3.0,
        "scale": -0.5,
    }
    lines = str(explain("9.0", kv_lens=[1, 2], **options)).splitlines()
    assert lines[0] == "cuflash plan: sm90 on sm_90 (compute capability 9.0)"
    assert any(line.startswith("  why ") and "fused kernel" in line for line in lines)
    (problem,) = (line for line in lines if line.startswith("  problem"))
    for part in (
        "float16", "batch 2", "8/2 heads", "100 queries x 100 keys", "dim 64", "window (5, 0)",
        "top-left", "softcap 3", "kv_lens", "scale -0.5",
    ):  # fmt: skip
        assert part in problem
    assert "causal" in str(explain("cpu", causal=True))
    for refusal in explain("9.0").refused:
        (line,) = (line for line in lines if line.startswith(f"  not {refusal.family} "))
        assert all(reason in line for reason in refusal.reasons)


# --- the chunks of the standard family ------------------------------------------------------------


class Recorder:
    """Stands for a call of the standard family, and keeps what it is told to compute."""

    chunks: list[tuple[slice, slice, slice]]

    def __init__(self, plan: Plan, operands: Any) -> None:
        Recorder.chunks = []

    def chunk(self, entries: slice, heads: slice, rows: slice) -> None:
        Recorder.chunks.append((entries, heads, rows))


def chunk_bytes(plan: Plan, chunk: tuple[slice, slice, slice]) -> int:
    """What a chunk allocates: scores, weights in 16 bits beside them, sums and totals."""
    spec = plan.spec
    entries, heads, rows = (part.stop - part.start for part in chunk)
    pitch = -(-spec.kv_len // 8) * 8
    is_float32 = "float32" in plan.tiling.note.split(",")[0]
    per_row = pitch * (4 if is_float32 else 6) + 4 * spec.head_dim_v + 4
    count: int = entries * heads * spec.group * rows * per_row
    return count


LONG = st.integers(1, 9) | st.integers(1, 2000)


@settings(deadline=None, max_examples=300, print_blob=True)
@example(batch=70001, kv_heads=1, group=1, q_len=1, kv_len=64, dim_v=64, dtype="float16")
@example(batch=70001, kv_heads=5, group=1, q_len=3, kv_len=9, dim_v=8, dtype="bfloat16")
@example(batch=1, kv_heads=1, group=40, q_len=17, kv_len=2**20, dim_v=256, dtype="float16")
@example(batch=2, kv_heads=3, group=40, q_len=2, kv_len=2**20, dim_v=256, dtype="float32")
@example(batch=3, kv_heads=8, group=4, q_len=2**17, kv_len=4096, dim_v=128, dtype="bfloat16")
@example(batch=2, kv_heads=3, group=1, q_len=5, kv_len=0, dim_v=1, dtype="float16")
@given(
    batch=LONG,
    kv_heads=st.integers(1, 40),
    group=st.integers(1, 40),
    q_len=LONG | st.integers(1, 10**6),
    kv_len=st.integers(0, 3000) | st.integers(0, 2**20),
    dim_v=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_chunks_cover_the_problem_within_the_workspace(
    batch: int, kv_heads: int, group: int, q_len: int, kv_len: int, dim_v: int, dtype: str
) -> None:
    assume(batch * kv_heads * group * q_len * (kv_len + dim_v) < 2**40)
    q = ArrayInfo((batch, kv_heads * group, q_len, 64), dtype)
    k, v = (ArrayInfo((batch, kv_heads, kv_len, dim), dtype) for dim in (64, dim_v))
    plan = cuflash.explain(q, k, v, device="7.5" if batch % 2 else "9.0", kernel="standard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard, "_Call", Recorder)
        standard.prepare(plan)(SimpleNamespace())  # type: ignore[arg-type]
    chunks = Recorder.chunks
    lengths = (batch, kv_heads, q_len)
    for axis, length in enumerate(lengths):
        parts = sorted({(chunk[axis].start, chunk[axis].stop) for chunk in chunks})
        assert (parts[0][0], parts[-1][1]) == (0, length)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), "a gap or an overlap"
        assert all(start < stop for start, stop in parts)
    # All combinations of the parts, each once: every (entry, head, row) is in exactly one chunk.
    count = np.prod([len({chunk[axis].start for chunk in chunks}) for axis in range(3)])
    starts = {tuple(part.start for part in chunk) for chunk in chunks}
    assert len(chunks) == len(starts) == count
    used = max(chunk_bytes(plan, chunk) for chunk in chunks)
    assert used == plan.tiling.workspace <= standard._WORKSPACE
    matrices = max((c[0].stop - c[0].start) * (c[1].stop - c[1].start) for c in chunks)
    assert matrices <= standard._MAX_MATRICES < 65536
    assert plan.tiling.heads == matrices * group


def test_a_small_problem_is_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "_Call", Recorder)
    standard.prepare(explain("8.0", kernel="standard"))(SimpleNamespace())  # type: ignore[arg-type]
    assert Recorder.chunks == [(slice(0, 2), slice(0, 2), slice(0, 100))]


@pytest.mark.parametrize(
    ("device", "dtype", "operands"),
    [("7.5", "bfloat16", "float32"), ("7.5", "float16", "float16"), ("8.0", "bfloat16", "bfloat16"),
     ("9.0", "float32", "float32")],
)  # fmt: skip
def test_products_of_bfloat16_need_compute_capability_8(
    device: str, dtype: str, operands: str
) -> None:
    plan = explain(device, dtype, kernel="standard")
    assert plan.tiling.note == f"products of {operands}, results in float32"


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "capability"),
    [("9.0", (9, 0)), ("sm_90", (9, 0)), ("sm90", (9, 0)), ("90", (9, 0)), ("sm_90a", (9, 0)),
     ("7.5", (7, 5)), ("8.6", (8, 6)), ("10.0", (10, 0)), ("sm_100", (10, 0)), ("sm_120a", (12, 0)),
     ("12.1", (12, 1))],
)  # fmt: skip
def test_named_capabilities(text: str, capability: tuple[int, int]) -> None:
    found = named(text)
    assert (found.kind, found.compute_capability) == ("cuda", capability)
    assert found.name == "sm_{}{}".format(*capability)
    assert str(found).endswith("(compute capability {}.{})".format(*capability))


def test_the_cpu_is_a_device() -> None:
    assert named("cpu") is devices.CPU is devices.of_array("cpu")
    assert str(devices.CPU) == "CPU"


@pytest.mark.parametrize("text", ["", "gpu", "9", "9.", ".0", "sm_", "9.0.0", "h100", "-9.0"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^device: got '.*'; expected 'cpu' or a compute capab"):
        named(text)
    with pytest.raises(ValueError, match=r"^device: got"):
        explain(text)


def test_a_device_can_be_given_as_data() -> None:
    device = Device("cuda", "a future GPU", compute_capability=(13, 7))
    plan = cuflash.explain(*stand_ins(), device=device)
    assert plan.device is device
    assert str(plan).startswith("cuflash plan: sm80 on a future GPU (compute capability 13.7)")


def test_without_a_gpu_its_arrays_need_a_device_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "unavailable_reason", lambda: "it was sold")
    devices.cuda_device.cache_clear()
    with pytest.raises(RuntimeError, match="no GPU here: it was sold"):
        cuflash.explain(*stand_ins())
    assert devices.cuda_devices() == []


# --- CUFLASH_LOG ----------------------------------------------------------------------------------


def test_each_plan_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_logged", set())
    q = np.ones((3, 8), np.float32)
    for value, times, expected in (("", 1, 0), ("0", 1, 0), ("1", 3, 1), ("1", 1, 1)):
        monkeypatch.setenv("CUFLASH_LOG", value)
        kinds.forget()
        for _ in range(times):
            cuflash.attention(q, q, q)
        assert len(caplog.records) == expected
    cuflash.attention(q, q, q, causal=True)
    first, second = caplog.records
    assert first.getMessage() == str(cuflash.explain(q, q, q))
    assert second.getMessage() == str(cuflash.explain(q, q, q, causal=True))
    assert (first.name, first.levelno) == ("cuflash", logging.INFO)


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("0", 0), (None, 0)])
def test_the_log_goes_to_standard_error(value: str | None, expected: int) -> None:
    code = "import numpy as n, cuflash as c; q = n.ones((3, 8)); [c.attention(q, q, q) for _ in q]"
    environment = {name: text for name, text in os.environ.items() if name != "CUFLASH_LOG"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if value is not None:
        environment["CUFLASH_LOG"] = value
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert done.stderr.count("cuflash plan: reference on CPU") == expected
    assert bool(done.stderr) == bool(expected)


def test_lengths_that_a_kernel_can_not_count_are_refused() -> None:
    q, k = ArrayInfo((1, 1, 4, 8)), ArrayInfo((1, 1, 2**31, 8))
    with pytest.raises(NotImplementedError, match="standard: takes lengths up to"):
        cuflash.explain(q, k, k, device="7.5")
    with pytest.raises(NotImplementedError, match="sm80: takes lengths below"):
        cuflash.explain(q, k, k, device="8.0", kernel="sm80")


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
@pytest.mark.parametrize(("option", "sign"), [("scale", 1), ("scale", -1), ("softcap", 1)])
def test_factors_that_a_kernel_can_not_hold_are_refused(
    option: str, sign: int, capability: str
) -> None:
    q = ArrayInfo((1, 1, 4, 8))
    fused = "sm80" if capability == "8.0" else "sm90"
    assert cuflash.explain(q, q, q, device=capability, **{option: sign * 1e20}).family == fused
    beyond = {option: sign * 2e20}
    assert cuflash.explain(q, q, q, device=capability, **beyond).family == "standard"
    for family in ("sm80", fused):
        with pytest.raises(NotImplementedError, match=f"{family}: takes {option} up to 1e"):
            cuflash.explain(q, q, q, device=capability, kernel=family, **beyond)
