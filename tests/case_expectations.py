"""Judges the outcome of an attention case by the expectation types of `data/attention_cases.json`.

Every check returns the list of what does not hold, so that alternatives can be tried in turn; a
field or a type that is not known raises instead of being passed over.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attention_cases
import numpy as np
from attention_cases import FORWARD_IGNORES, Backend, Case, ForwardCall, Outcome
from case_recipes import number

Expectation = Mapping[str, Any]


class Trial:
    """One case on one backend and kernel family; the call is made when first asked about."""

    def __init__(self, case: Case, backend: Backend, kernel: str) -> None:
        self.case = case
        self.backend = backend
        self.kernel = kernel

    @cached_property
    def call(self) -> ForwardCall:
        return attention_cases.forward_call(self.case)

    @cached_property
    def outcome(self) -> Outcome:
        return attention_cases.run(self.call, self.backend, self.kernel)

    @property
    def expectations(self) -> list[Expectation]:
        """The main expectation and those that hold besides."""
        judged = self.case.get("forward", self.case)
        return [judged["expect"], *judged.get("also", [])]

    def with_options(self, options: Mapping[str, Any]) -> Trial:
        """The same case with some options changed."""
        return self._with(options={**self.case["options"], **options})

    def with_replaced(self, name: str, value: Any) -> Trial:
        """The same case with one option, or one dimension or the dtype of its inputs, replaced."""
        if name == "dtype":
            return self._with(dtype=value)
        if name in ("seqlen", "head_dim"):
            axis = 1 if name == "seqlen" else -1
            inputs = {
                key: {**spec, "shape": _with_item(spec["shape"], axis, value)}
                for key, spec in self.case["inputs"].items()
            }
            return self._with(inputs=inputs)
        return self.with_options({name: value})

    def _with(self, **fields: Any) -> Trial:
        return type(self)({**self.case, **fields}, self.backend, self.kernel)

    @property
    def owed(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each result."""
        batch, seq, heads, _ = self.call.shape("q")
        return {
            "out": (self.call.out_shape, self.call.arrays["q"].view.dtype),
            "lse": ((batch, heads, seq), np.dtype(np.float32)),
        }

    def got(self, target: str) -> np.ndarray:
        """A result in float64: packed if the case is, else only its sampled part."""
        result = self.outcome.outputs[target].astype(np.float64)
        if self.call.packing:
            return self._pack(target, result)
        batches, rows = self._sample
        return result[np.ix_(batches, rows)] if target == "out" else result[batches][:, :, rows]

    def wanted(self, target: str) -> np.ndarray:
        """The true result for `got`: the one known, or else the reference."""
        known = self.case.get("known", {})
        if target in known:
            return np.full_like(self.got(target), number(known[target]))
        return self._reference[target]

    @cached_property
    def _reference(self) -> dict[str, np.ndarray]:
        batches, rows = self._sample
        results = attention_cases.reference(self.call, batches, rows)
        if self.call.packing:
            return {"out": self._pack("out", results["out"])}
        return results

    def _pack(self, target: str, padded: np.ndarray) -> np.ndarray:
        if target != "out" or self.call.packing is None:
            raise ValueError(f"{self.case['id']}: {target} can't be packed")
        return self.call.packing.pack(padded)

    @property
    def _sample(self) -> tuple[list[int], list[int]]:
        sample = dict(self.case.get("sample", {}))
        batch, seq = self.call.shape("q")[:2]
        batches = sample.pop("batch", list(range(batch)))
        rows = sample.pop("rows", list(range(seq)))
        if sample:
            raise ValueError(f"{self.case['id']}: unknown samples {sorted(sample)}")
        return batches, rows


def judge(case: Case, backend: Backend, kernel: str) -> None:
    """Raise AssertionError with everything that does not hold for a case."""
    judge_trial(Trial(case, backend, kernel))


def judge_trial(trial: Trial) -> None:
    """Raise AssertionError with everything that does not hold for a trial."""
    failures = contract_failures(trial)
    for expectation in trial.expectations:
        failures += failures_of(expectation, trial)
    if failures:
        title = f"{trial.case['id']} on {trial.backend.name}, kernel {trial.kernel}"
        lines = [title, *failures, f"why: {trial.case['why']}"]
        raise AssertionError("\n  ".join(lines)) from trial.outcome.error


def failures_of(expectation: Expectation, trial: Trial) -> list[str]:
    """What does not hold of an expectation; nothing when all does."""
    fields = dict(expectation)
    return CHECKS[fields.pop("type")](trial, **fields)


def check_fields(expectation: Expectation) -> None:
    """Raise for a type or a field of an expectation that the checks do not know."""
    fields = dict(expectation)
    check = CHECKS[fields.pop("type")]
    inspect.signature(check).bind(None, **fields)
    if check is _repeat_with:
        unknown = set(fields) - REPLACEABLE
        if unknown:
            raise ValueError(f"repeat_with: can't replace {sorted(unknown)}")
    for part in fields.get("of", []):
        check_fields(part)


def contract_failures(trial: Trial) -> list[str]:
    """What every successful call owes: shapes, dtypes, and zeros in rows past `q_lens`."""
    outputs, owed = trial.outcome.outputs, trial.owed
    if not outputs:
        return []
    failures = [
        f"{name} is {array.dtype} {array.shape}; expected {owed[name][1]} {owed[name][0]}"
        for name, array in outputs.items()
        if (array.shape, array.dtype) != owed[name]
    ]
    if trial.call.packing and np.any(trial.call.packing.padding(outputs["out"])):
        failures.append("rows past q_lens are not 0")
    return failures


# --- expectation types: (trial, **fields) -> what does not hold ---------------------------------


def _close(trial: Trial, *, atol: float, rtol: float, targets: Sequence[str]) -> list[str]:
    if trial.outcome.error:
        return [_raised(trial)]
    differences = {x: _difference(trial.got(x), trial.wanted(x), atol, rtol) for x in targets}
    return [f"{target}: {text}" for target, text in differences.items() if text]


def _raises(
    trial: Trial, *, error: str, accept: Sequence[str], mentions: Sequence[str]
) -> list[str]:
    raised = trial.outcome.error
    if raised is None:
        return [f"nothing was raised; expected {error}"]
    if not {cls.__name__ for cls in type(raised).__mro__} & set(accept):
        return [f"{_raised(trial)}; expected {' or '.join(accept)}"]
    if not any(_mentions(str(raised), word) for word in mentions):
        return [f"{_raised(trial)}; expected a message that mentions {' or '.join(mentions)}"]
    return []


def _finite(trial: Trial, *, targets: Sequence[str]) -> list[str]:
    if trial.outcome.error:
        return [_raised(trial)]
    return [f"{x} has NaN or Inf" for x in targets if not np.isfinite(trial.got(x)).all()]


def _zero_rows(
    trial: Trial,
    *,
    target: str,
    rows: Mapping[str, Any],
    batch: int | None = None,
    lse: float | str | None = None,
) -> list[str]:
    if trial.outcome.error:
        return [_raised(trial)]
    indices = _row_indices(rows)
    got = trial.got(target)
    packed = trial.call.packing is not None
    if packed and batch is not None:
        raise ValueError("zero_rows: packed rows have no batch")
    entries = slice(None) if batch is None else slice(batch, batch + 1)
    failures = []
    if np.any(got[indices] if packed else got[entries][:, indices]):
        failures.append(f"{target} is not 0 in rows {rows}")
    if lse is not None and np.any(trial.got("lse")[entries][:, :, indices] != number(lse)):
        failures.append(f"lse is not {lse} in rows {rows}")
    return failures


def _shape(trial: Trial, **shapes: Sequence[int]) -> list[str]:
    if trial.outcome.error:
        return [_raised(trial)]
    outputs = trial.outcome.outputs
    return [
        f"{name} has shape {outputs[name].shape}; expected {tuple(shape)}"
        for name, shape in shapes.items()
        if outputs[name].shape != tuple(shape)
    ]


def _equal_variants(
    trial: Trial,
    *,
    variants: Sequence[Mapping[str, Any]],
    atol: float,
    rtol: float,
    targets: Sequence[str],
) -> list[str]:
    failures = []
    for options in variants:
        if set(options) & FORWARD_IGNORES:
            raise ValueError(f"equal_variants: {options} would not change the forward call")
        variant = trial.with_options(options)
        if trial.outcome.error or variant.outcome.error:
            failures.append(f"{options}: {_raised(variant if variant.outcome.error else trial)}")
            continue
        failures += [f"{options}: {text}" for text in contract_failures(variant)]
        for target in targets:
            text = _difference(variant.got(target), trial.got(target), atol, rtol)
            if text:
                failures.append(f"{options}: {target}: {text}")
    return failures


def _repeat_with(trial: Trial, **replacement: Sequence[Any]) -> list[str]:
    ((name, values),) = replacement.items()
    failures = []
    for value in values:
        again = trial.with_replaced(name, value)
        texts = contract_failures(again) + failures_of(again.expectations[0], again)
        failures += [f"with {name} = {value}: {text}" for text in texts]
    return failures


def _repeat_runs(trial: Trial, *, runs: int) -> list[str]:
    failures = []
    for run in range(1, runs):
        again = trial.with_options({})
        texts = contract_failures(again) + failures_of(again.expectations[0], again)
        failures += [f"run {run}: {text}" for text in texts]
    return failures


def _bitwise_repeat(trial: Trial, *, runs: int, targets: Sequence[str]) -> list[str]:
    if trial.outcome.error:
        return [_raised(trial)]
    first = {target: trial.outcome.outputs[target].tobytes() for target in targets}
    failures = []
    for run in range(1, runs):
        trial.backend.disturb()
        again = trial.with_options({})
        if again.outcome.error:
            return [f"run {run}: {_raised(again)}"]
        failures += [
            f"run {run}: {target} has other bits"
            for target in targets
            if again.outcome.outputs[target].tobytes() != first[target]
        ]
    return failures


def _context_alive(trial: Trial) -> list[str]:
    # The call comes first, whatever became of it.
    _ = trial.outcome
    failure = trial.backend.failure()
    return [f"the device no longer works: {failure}"] if failure else []


def _any_of(trial: Trial, *, of: Sequence[Expectation]) -> list[str]:
    failures: list[str] = []
    for expectation in of:
        texts = failures_of(expectation, trial)
        if not texts:
            return []
        failures += [f"neither: {text}" for text in texts]
    return failures


def _all(trial: Trial, *, of: Sequence[Expectation]) -> list[str]:
    return [text for expectation in of for text in failures_of(expectation, trial)]


def _procedure(trial: Trial, *, steps: Sequence[str], passes_when: str) -> list[str]:
    raise ValueError(f"{trial.case['id']}: only `case_procedures` can do its steps")


CHECKS: dict[str, Callable[..., list[str]]] = {
    "close": _close,
    "raises": _raises,
    "finite": _finite,
    "zero_rows": _zero_rows,
    "shape": _shape,
    "equal_variants": _equal_variants,
    "repeat_with": _repeat_with,
    "repeat_runs": _repeat_runs,
    "bitwise_repeat": _bitwise_repeat,
    "context_alive": _context_alive,
    "procedure": _procedure,
    "any_of": _any_of,
    "all": _all,
}
REPLACEABLE = {"dtype", "seqlen", "head_dim", "window", "scale", "dropout_p"}


def _difference(got: np.ndarray, wanted: np.ndarray, atol: float, rtol: float) -> str | None:
    """How far `got` is from `wanted`, where it is too far."""
    if got.shape != wanted.shape:
        return f"shape {got.shape}; expected {wanted.shape}"
    finite = np.isfinite(got) & np.isfinite(wanted)
    with np.errstate(invalid="ignore"):
        excess = np.abs(got - wanted) - (atol + rtol * np.abs(wanted))
    agrees = np.where(finite, excess <= 0, (got == wanted) | (np.isnan(got) & np.isnan(wanted)))
    if agrees.all():
        return None
    ranked = np.where(agrees, -np.inf, np.where(finite, excess, np.inf))
    worst = np.unravel_index(np.argmax(ranked), got.shape)
    at = tuple(int(i) for i in worst)
    return (
        f"{np.count_nonzero(~agrees)} of {got.size} elements differ, most at {at}: "
        f"got {got[worst]:.6g}, expected {wanted[worst]:.6g} (atol {atol}, rtol {rtol})"
    )


def _row_indices(rows: Mapping[str, Any]) -> list[int]:
    ((kind, value),) = rows.items()
    if kind == "first":
        return list(range(value))
    if kind == "range":
        return list(range(*value))
    if kind == "list":
        return list(value)
    raise ValueError(f"rows: unknown kind {kind!r}")


def _raised(trial: Trial) -> str:
    error = trial.outcome.error
    return f"raised {type(error).__name__}: {error}"


def _mentions(message: str, word: str) -> bool:
    """Whether a message holds a word; a name of one letter must stand alone to count."""
    if len(word) == 1:
        return re.search(rf"\b{word}\b", message, re.IGNORECASE) is not None
    return word.lower() in message.lower()


def _with_item(shape: Sequence[int], axis: int, value: int) -> list[int]:
    changed = list(shape)
    changed[axis] = value
    return changed
