"""`cuflash check --backward`: passes what is right, and notices what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from spoiled_family import spoil_results

from cuflash import check, check_gradients, cli, dispatch, families, oracle

Spoil = Callable[[Any], None]


def test_every_problem_passes_on_the_cpu() -> None:
    found = list(check_gradients.run(("reference",), ("float16", "float32"), seed=3))
    assert [r.problem for r in found] == 2 * [problem.name for problem in check.PROBLEMS]
    for result in found:
        assert (result.family, result.device, result.note) == ("reference", "CPU", "")
        assert result.passed, result
        assert result.error is not None
        assert 0 < result.error <= 1
        assert result.lse_error is None
        assert not result.refused


def one_element(operands: Any) -> None:
    """Off by a quarter, where gradients are of size 1."""
    operands.dk[0, -1, 0, 0] += 0.25


def nan(operands: Any) -> None:
    operands.dv[-1, 0, 0, -1] = np.nan


def where_nothing_contributes(operands: Any) -> None:
    """Seen in the problem of used lengths alone, whose second entry has no queries."""
    if operands.q_lens is not None:
        operands.dq[1] = 1e-7


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Spoil], None]]:
    """Let the CPU's backward pass finish, then spoil what it wrote."""
    family = families.load_backward("reference")

    def spoil_with(spoil: Spoil) -> None:
        spoil_results(monkeypatch, family, lambda plan, operands: spoil(operands))

    yield spoil_with
    dispatch._choose.cache_clear()


@pytest.mark.parametrize(
    ("spoil", "least"),
    [(one_element, len(check.PROBLEMS) - 3), (nan, len(check.PROBLEMS)),
     (where_nothing_contributes, 1)],
)  # fmt: skip
def test_a_wrong_family_fails(
    spoil: Spoil, least: int, broken: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(spoil)
    arguments = ["check", "--backward", "--family", "reference", "--dtype", "float16"]
    assert cli.main([*arguments, "--seed", "0"]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.endswith("FAIL")]
    assert len(failed) >= least
    assert summary == f"{len(check.PROBLEMS) - len(failed)} of {len(check.PROBLEMS)} passed, on CPU"


def test_errors_are_of_the_element_that_is_worst() -> None:
    rng = np.random.default_rng(0)
    dout, q, k, v = (rng.standard_normal((1, 2, 20, 8)).astype(np.float16) for _ in range(4))
    exact = oracle.gradients(dout, q, k, v)
    right = tuple(gradient.astype(np.float16) for gradient in exact)
    assert max(check_gradients.errors(right, dout, q, k, v).values()) < 0.5
    dq, dk, dv = (gradient.copy() for gradient in right)
    dv[0, 1, 7, 3] += np.float16(0.25)
    found = check_gradients.errors((dq, dk, dv), dout, q, k, v)
    assert found["dq"] < 0.5
    assert found["dk"] < 0.5
    assert found["dv"] > 10
