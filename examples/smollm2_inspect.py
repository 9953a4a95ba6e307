"""Looks inside the attention of a model: measures each layer's error, or saves its q, k, v."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from smollm2_model import Array, Attention, SmolLM2, to_numpy

from cuflash import oracle

# Half the gap between 1 and the next number: the largest relative error of one rounding.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The largest scaled score of a layer is 15 to 36 with this model, but for 65 in layer 18.
SCORE_MAGNITUDE = 30


def attention_bound(dtype_name: str) -> float:
    """Return the largest relative L2 error of one layer that rounding explains.

    Two roundings to the dtype of q, k, v: the probabilities before they multiply V, and the output.
    Each moves a term by at most one unit roundoff ``u``. Before them, a score ``s`` kept in float32
    is off by about ``|s| * 2**-24``, and the exponential turns that absolute error into a relative
    one. Together ``2 u + 30 * 2**-24``, with the size that a layer's largest scores have: 1.9e-6 in
    float32, 9.8e-4 in float16 and 7.8e-3 in bfloat16. The errors of many terms have mixed signs, so
    a correct kernel stays well below.
    """
    return 2 * UNIT_ROUNDOFF[dtype_name] + SCORE_MAGNITUDE * UNIT_ROUNDOFF["float32"]


def logits_bound(dtype_name: str, layers: int) -> float:
    """Return the largest relative L2 error of the logits that rounding in attention explains.

    The logits are linear in the normalised residual stream, to which every layer adds its output.
    Layers round independently, so their errors add up as the root of the sum of squares; the bound
    takes it that later layers pass an error on about as large as it came.
    """
    return math.sqrt(layers) * attention_bound(dtype_name)


@dataclass(frozen=True)
class Error:
    """How far an array is from its float64 counterpart."""

    max_abs: float
    relative_l2: float

    @classmethod
    def between(cls, computed: Array, exact: Array) -> Error:
        """Measure ``computed`` against ``exact``, in float64."""
        reference = to_numpy(exact).astype(np.float64)
        difference = to_numpy(computed).astype(np.float64) - reference
        return cls(
            max_abs=float(np.abs(difference).max()),
            relative_l2=float(np.linalg.norm(difference) / np.linalg.norm(reference)),
        )


@dataclass(frozen=True)
class StepCheck:
    """The errors of one forward pass: attention layer by layer, and the logits at its end."""

    name: str
    layer_errors: list[Error]
    logits_error: Error
    same_argmax: bool

    @property
    def worst_layer(self) -> int:
        """The layer whose attention has the largest relative L2 error."""
        return int(np.argmax([error.relative_l2 for error in self.layer_errors]))

    def within_bounds(self, dtype_name: str) -> bool:
        """Tell whether rounding explains the errors; a NaN never passes.

        The next token is not asked to be the same: a tie within the rounding error may break either
        way, and any larger difference shows in the logits.
        """
        return all(
            error.relative_l2 <= attention_bound(dtype_name) for error in self.layer_errors
        ) and self.logits_error.relative_l2 <= logits_bound(dtype_name, len(self.layer_errors))


def check_against_float64(
    model: SmolLM2, tokens: Sequence[int], attention: Attention
) -> list[StepCheck]:
    """Compare attention with float64 in every layer, over a prefill and one decoding step.

    Each layer's output is compared on the very q, k, v it was given. The logits are compared with
    those of a forward pass that has float64 attention in every layer.

    Parameters
    ----------
    model
        Its ``attention_dtype`` is the dtype under test.
    tokens
        The prompt.
    attention
        The attention under test.
    """

    def exact_attention(q: Array, k: Array, v: Array) -> Array:
        out, _ = oracle.attention(to_numpy(q), to_numpy(k), to_numpy(v), causal=True)
        return model.xp.asarray(out)

    def watched_attention(q: Array, k: Array, v: Array) -> Array:
        out = attention(q, k, v)
        layer_errors.append(Error.between(out, exact_attention(q, k, v)))
        return out

    def check_step(name: str, step: Sequence[int]) -> StepCheck:
        logits = to_numpy(model.forward(step, cache, watched_attention))
        exact_logits = to_numpy(model.forward(step, exact_cache, exact_attention))
        return StepCheck(
            name=name,
            layer_errors=layer_errors.copy(),
            logits_error=Error.between(logits, exact_logits),
            same_argmax=bool(logits.argmax() == exact_logits.argmax()),
        )

    cache, exact_cache = model.new_cache(len(tokens)), model.new_cache(len(tokens))
    layer_errors: list[Error] = []
    prefill = check_step("prefill", tokens[:-1])
    layer_errors.clear()
    return [prefill, check_step("decode", tokens[-1:])]


def format_check(steps: Sequence[StepCheck], dtype_name: str) -> str:
    """Lay the checks out as a table, the bounds in the last row."""
    rows = [
        f"{'':8} {'worst':>5} {'attention':>19} {'logits':>19} next",
        f"{dtype_name:8} {'layer':>5}" + f" {'max abs':>9} {'rel L2':>9}" * 2 + " token",
    ]
    for step in steps:
        worst, logits = step.layer_errors[step.worst_layer], step.logits_error
        rows.append(
            f"{step.name:8} {step.worst_layer:5} {worst.max_abs:9.1e} {worst.relative_l2:9.1e} "
            f"{logits.max_abs:9.1e} {logits.relative_l2:9.1e} "
            f"{'same' if step.same_argmax else 'differs'}"
        )
    layers = len(steps[0].layer_errors)
    rows.append(
        f"{'bound':8} {'':5} {'':9} {attention_bound(dtype_name):9.1e} "
        f"{'':9} {logits_bound(dtype_name, layers):9.1e}"
    )
    return "\n".join(rows)


def save_qkv(
    file: Path,
    model: SmolLM2,
    tokens: Sequence[int],
    layers: Sequence[int],
    attention: Attention,
) -> None:
    """Save what attention is given in some layers during the prefill, rounded to float16.

    Writes a compressed npz file: for each layer ``N`` the arrays ``layerN_q`` of shape
    ``(heads, tokens, head_dim)`` and ``layerN_k`` and ``layerN_v`` of shape
    ``(kv_heads, tokens, head_dim)``, queries and keys after the rotary embedding; ``tokens``, the
    token numbers; and ``metadata``, a string of JSON.
    """
    unknown = sorted(set(layers) - set(range(model.config.layers)))
    if unknown:
        raise ValueError(f"no layer {unknown}: the model has layers 0 to {model.config.layers - 1}")
    inputs: list[tuple[Array, Array, Array]] = []

    def recording_attention(q: Array, k: Array, v: Array) -> Array:
        inputs.append((q, k, v))
        return attention(q, k, v)

    model.forward(tokens, model.new_cache(len(tokens)), recording_attention)
    metadata = {
        "model": model.config.name,
        "layers": list(layers),
        "heads": model.config.heads,
        "kv_heads": model.config.kv_heads,
        "head_dim": model.config.head_dim,
        "causal": True,
        "rope_base": model.config.rope_base,
    }
    arrays: dict[str, Any] = {
        f"layer{layer}_{name}": to_numpy(array).astype(np.float16)
        for layer in layers
        for name, array in zip("qkv", inputs[layer], strict=True)
    }
    np.savez_compressed(
        file, tokens=np.array(tokens, np.int32), metadata=json.dumps(metadata), **arrays
    )
