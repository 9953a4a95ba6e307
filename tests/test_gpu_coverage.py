"""What the GPU tests and `cuflash check` reach, planned without a GPU."""

from __future__ import annotations

from typing import Any

from gpu_cases import (
    MORE_OPTIONS,
    OPTIONS,
    Problem,
    problems_of_sm90,
    problems_of_sm90_backward,
    used_lengths,
)

import cuflash
from cuflash import ArrayInfo, Plan, check
from cuflash.families import sm90
from cuflash.families.backward import sm90 as sm90_backward
from cuflash.runtime.device import named


def plan_of(problem: Problem, **lens: Any) -> Plan:
    p = problem
    shape = (p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.dim, p.dim_v)
    return plan_for_sm90(shape, p.dtype, (OPTIONS | MORE_OPTIONS)[p.options] | lens)


def plan_for_sm90(shape: tuple[int, ...], dtype: str, options: dict[str, Any]) -> Plan:
    batch, heads, kv_heads, q_len, kv_len, dim, dim_v = shape
    q = ArrayInfo((batch, heads, q_len, dim), dtype)
    k, v = (ArrayInfo((batch, kv_heads, kv_len, d), dtype) for d in (dim, dim_v))
    return cuflash.explain(q, k, v, device="9.0", kernel="sm90", **options)


def test_every_kernel_of_sm90_has_a_gpu_test() -> None:
    problems = problems_of_sm90()
    plans = [plan_of(p, **lens) for p in problems for lens in ({}, used_lengths(p))]
    planned = {plan.tiling.launch.module for plan in plans if plan.tiling.launch is not None}
    dims = sorted({dim for p in problems for dim in (p.dim, p.dim_v)})
    listed = set(sm90.specialisations(named("9.0"), dims, ("float16", "bfloat16")))
    assert sorted(module.name for module in listed - planned) == []
    assert sorted(module.name for module in planned - listed) == []
    assert len(listed) > 200


def test_every_kernel_of_the_backward_pass_of_sm90_has_a_gpu_test() -> None:
    problems = problems_of_sm90_backward()
    plans = [
        plan_of(p, **lens, deterministic=deterministic, backward=True)
        for p in problems
        for lens in ({}, used_lengths(p))
        for deterministic in (False, True)
    ]
    planned = {plan.tiling.launch.module for plan in plans if plan.tiling.launch is not None}
    dims = sorted({dim for p in problems for dim in (p.dim, p.dim_v)})
    listed = set(sm90_backward.specialisations(named("9.0"), dims, ("float16", "bfloat16")))
    assert planned == listed
    assert len(listed) == 240
    for plan in plans:
        assert plan.spec.kv_len > 2 * plan.tiling.keys
        assert plan.spec.q_len > 2 * plan.tiling.q_rows
        assert plan.spec.kv_len % plan.tiling.keys
        assert plan.spec.q_len % plan.tiling.q_rows


def test_each_of_them_has_several_tiles_and_cut_ones() -> None:
    for problem in problems_of_sm90():
        tiling = plan_of(problem).tiling
        assert problem.kv_len > 2 * tiling.keys
        assert problem.kv_len % tiling.keys
        assert problem.q_len % tiling.q_rows
        assert problem.q_len > tiling.q_rows or problem.q_len == 100


def test_check_reaches_pairs_three_groups_and_drawn_tickets() -> None:
    reached = set()
    for problem in check.PROBLEMS:
        options = dict(problem.options)
        if options.keys() & {"mask", "bias"} or problem.shape[5] % 8:
            continue  # not for sm90
        plan = plan_for_sm90(problem.shape, "float16", options)
        assert plan.tiling.launch is not None
        config = dict(plan.tiling.launch.module.config)
        row_tiles = -(-plan.spec.q_len // plan.tiling.q_rows)
        if config["cluster"] == 2 and row_tiles > 2:
            reached.add("several tiles of a pair")
        if config["groups"] == 3 and config["head_dim"] == 128:
            reached.add("three warpgroups at head dim 128")
        packs = problem.shape[0] * problem.shape[1] // plan.tiling.heads
        if config["bounded"] and packs * row_tiles > 1.4 * plan.tiling.launch.blocks:
            reached.add("drawn tickets")
    assert len(reached) == 3, reached
