"""`explain` of attention in 8 bits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArrayInfo
from cuflash.cli import main
from cuflash.fp8 import Fp8Recipe
from cuflash.fp8.gpu_quantizer import Shapes

Q = ArrayInfo((2, 8, 1000, 128), "float16", "cuda:0")
K = ArrayInfo((2, 2, 1500, 128), "float16", "cuda:0")


def explain(recipe: Any = "f8", device: str = "9.0", **options: Any) -> Any:
    return cuflash.explain(Q, K, K, recipe=recipe, device=device, **options)


def test_it_tells_of_the_kernel_that_runs() -> None:
    plan = explain(causal=True)
    assert plan.family == "sm90_fp8"
    assert plan.why
    assert not plan.refused
    assert (plan.tiling.q_rows * plan.tiling.heads, plan.tiling.keys) == (3 * 64, 64)
    launch = plan.tiling.launch
    assert launch.module.name == "cuflash_fwd_sm90_fp8_d128_f16_e4m3_bounded_lagging"
    assert launch.threads == 512
    assert plan.tiling.workspace == Shapes.of(plan.spec, 128).places["end"]
    shown = str(plan)
    for part in ("sm90_fp8 on sm_90", "e4m3 q and k", "rotated", "causal", launch.module.name):
        assert part in shown


def test_bytes_of_inputs_codes_and_outputs() -> None:
    q, k = 2 * 8 * 1000 * 128, 2 * 2 * 1500 * 128
    codes_and_out = 2 * (q + 2 * k) + 2 * q
    assert explain().hbm_bytes == 2 * (2 * q + 4 * k) + codes_and_out
    plain = Fp8Recipe(balance=False)
    assert explain(plain).hbm_bytes == 2 * (q + 4 * k) + codes_and_out
    uncentred = Fp8Recipe(balance=False, center_k=False)
    assert explain(uncentred).hbm_bytes == 2 * (q + 3 * k) + codes_and_out
    assert explain(uncentred, return_lse=True).hbm_bytes - explain(uncentred).hbm_bytes == q // 32


def test_recipes_choose_the_kernel() -> None:
    for recipe, mark in (("i8", "int8"), ("f8+", "first")):
        assert mark in explain(recipe).tiling.launch.module.name
    orthogonal = Fp8Recipe(rotation="orthogonal")
    with pytest.raises(NotImplementedError, match="no matrix"):
        explain(orthogonal)


@pytest.mark.parametrize("device", ["7.5", "8.0", "8.9", "10.0", "12.0"])
def test_other_gpus_are_refused(device: str) -> None:
    with pytest.raises(NotImplementedError, match=f"compute capability 9.0, not {device}"):
        explain(device=device)


def test_numpy_arrays_are_computed_step_by_step() -> None:
    q, k = np.zeros((8, 100, 64), np.float16), np.zeros((2, 200, 64), np.float16)
    plan = cuflash.explain(q, k, k, recipe="f8")
    assert plan.family == "reference"
    (refusal,) = plan.refused
    assert refusal.family == "sm90_fp8"
    assert "not a CPU" in refusal.reasons[0]


def test_it_is_plain_data() -> None:
    matrix = np.eye(128, dtype=np.float32)
    array = np.zeros((100, 128), np.float16)
    plan = cuflash.explain(array, array, array, recipe=Fp8Recipe(rotation=matrix))
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["recipe"]["rotation"][3][3] == 1
    assert found["family"] == "reference"
    assert found["hbm_bytes"] == plan.hbm_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "f9"}, ValueError, "recipe: got 'f9'"),
        ({"recipe": 8}, TypeError, "recipe: got 8"),
        ({"backward": True}, ValueError, "recipe: got one with backward=True"),
        ({"kernel": "sm90"}, TypeError, "explain with a recipe: unknown option 'kernel'"),
        ({"causal": 2}, TypeError, "causal: got 2"),
    ],
)
def test_what_does_not_go_together(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        explain(**options)


def test_the_command_line_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--shape", "2,8,1000,128", "--kv-heads", "2", "--kv-len", "1500"]
    assert main([*command, "--device", "9.0", "--recipe", "f8"]) == 0
    assert capsys.readouterr().out.strip() == str(explain())
    assert main([*command, "--device", "9.0", "--recipe", "f8", "--kernel", "sm90"]) == 2
    assert "unknown option 'kernel'" in capsys.readouterr().err
