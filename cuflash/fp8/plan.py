"""`Fp8Plan`: what runs a problem in 8 bits, how, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..families import sm90_fp8
from ..operands import Operands
from ..plan import Plan, Refusal, Tiling
from ..runtime.device import Device
from ..spec import Options
from ..traffic import tiled_bytes
from .emulate import BLOCK_ROWS, REFERENCE_KEYS
from .inputs import checked_spec
from .recipe import Fp8Recipe

FAMILY = "sm90_fp8"
# Of `attention_fp8`.
OPTION_NAMES = (
    *("scale", "causal", "causal_align", "window", "softcap", "mask", "q_lens", "kv_lens"),
    *("layout", "return_lse", "out"),
)


@dataclass(frozen=True, slots=True)
class Fp8Plan(Plan):
    """The plan of `attention_fp8`."""

    recipe: Fp8Recipe

    @property
    def hbm_bytes(self) -> int:
        """Main-memory bytes of quantising and of attention: inputs once more where the recipe has
        statistics of them, codes written and read once, outputs once.
        """
        recipe, once = self.recipe, tiled_bytes(self.spec)
        q, k, v = (of_input // self.spec.item_size for of_input in (once.q, once.k, once.v))
        read = q * (1 + recipe.balance) + k * (1 + (recipe.balance or recipe.center_k)) + 2 * v
        return read * self.spec.item_size + 2 * (q + k + v) + once.out + once.lse

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the derived figures, as plain JSON types."""
        recipe = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in dataclasses.asdict(self.recipe).items()
        }
        return {**Plan.to_dict(self), "recipe": recipe}

    def __str__(self) -> str:
        first, *rest = Plan.__str__(self).splitlines()
        recipe = self.recipe
        shown = f"{recipe.qk_dtype} q and k, scales by {recipe.q_block} and {recipe.k_block}"
        if recipe.rotation is not None:
            shown += ", rotated"
        if recipe.first_tile_16bit:
            shown += ", first values in 16 bit"
        return "\n".join([first, f"  recipe     {shown}", *rest])


def plan_fp8(operands: Operands, options: Options, recipe: Fp8Recipe, device: Device) -> Fp8Plan:
    """The plan of a call on a device.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was given and what is expected.
    NotImplementedError
        With each reason, where a GPU has no kernel that takes the problem.
    """
    spec = checked_spec(operands, options)
    if spec.softcap is not None:
        recipe = dataclasses.replace(recipe, center_k=False)
    reasons = tuple(sm90_fp8.reasons_against(spec, recipe, device))
    if not reasons:
        why = "8 bits were asked for; quantised, then multiplied by wgmma from TMA's copies"
        tiling = sm90_fp8.plan(spec, recipe, device)
        return Fp8Plan(spec, device, FAMILY, why, tiling, (), recipe)
    if device.kind == "cuda":
        raise NotImplementedError(f"attention_fp8 on {device}: {'; '.join(reasons)}")
    why = f"NumPy arrays: step by step as {FAMILY} sums and rounds"
    rows = max(1, BLOCK_ROWS // max(spec.group, 1))
    head = 4 * spec.kv_len * (spec.head_dim + spec.head_dim_v)
    tile = 4 * rows * max(spec.group, 1) * REFERENCE_KEYS
    tiling = Tiling(rows, REFERENCE_KEYS, spec.group, head + tile)
    return Fp8Plan(spec, device, "reference", why, tiling, (Refusal(FAMILY, reasons),), recipe)
