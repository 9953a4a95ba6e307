"""What `quantize_fp8` makes of arrays on a GPU: codes and scales as the kernel takes them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ..runtime.device import Device
from ..spec import AttentionSpec
from .gpu_quantizer import Codes, Shapes
from .recipe import Fp8Recipe
from .rotation import Rotation, rotation_of
from .tensors import Fp8Tensor, Fp8Tensors

# Where key i of 16 lies in V, as weights come to a thread: see cuda_src/sm90/softmax8.cuh.
_PLACES = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


class GpuFp8Tensors(Fp8Tensors):
    """Quantised q, k and v in a GPU's memory, laid out for its kernel.

    `q`, `k` and `v` are described by arrays of that memory when they are asked for; v takes a copy
    then. Of v, `mean` is all that is added to results, and `residual` 0.
    """

    spec: AttentionSpec
    device: Device
    packed: Codes
    shapes: Shapes
    rank: int
    layout: str
    _recipe: Fp8Recipe

    def __init__(
        self, spec: AttentionSpec, recipe: Fp8Recipe, device: Device, codes: Codes, shapes: Shapes,
        rank: int, layout: str, q_lens: Any, kv_lens: Any,
    ) -> None:  # fmt: skip
        # As the base class, which is frozen, and checks what this has made.
        vars(self).update(
            spec=spec, device=device, packed=codes, shapes=shapes, rank=rank, layout=layout,
            q_lens=q_lens, kv_lens=kv_lens, dtype=spec.dtype, _recipe=recipe,
        )  # fmt: skip

    @property
    def recipe(self) -> Fp8Recipe:
        """The recipe of all three."""
        return self._recipe

    @cached_property
    def q(self) -> Fp8Tensor:
        """Views of q's codes and scales."""
        shapes, heads = self.shapes, (self.shapes.batch, self.shapes.q_heads)
        codes = self._codes("q_codes", *heads, shapes.q_len)
        block = self.recipe.q_block
        step = block if isinstance(block, int) else 1
        scale = self._numbers("q_scales", *heads, shapes.q_len, 1)[:, :, ::step]
        return self._tensor("q", codes, scale, balance=self._balance)

    @cached_property
    def k(self) -> Fp8Tensor:
        """Views of k's codes and scales."""
        shapes, heads = self.shapes, (self.shapes.batch, self.shapes.kv_heads)
        codes = self._codes("k_codes", *heads, shapes.kv_len)
        scales = self._numbers("k_scales", *heads, shapes.key_blocks, 4)
        tiles, blocks = -(-shapes.kv_len // 128), -(-shapes.kv_len // 64)
        if self.recipe.k_block == "columns":
            scale = scales[:, :, : 2 * tiles : 2].reshape(*heads, 4 * tiles, 1)
        elif self.recipe.k_block == 64:
            scale = scales[:, :, :blocks, :1]
        else:
            scale = scales[:, :, : 2 * tiles : 2, :1]
        mean = self._of_channels("k_means") if self.recipe.center_k else None
        return self._tensor("k", codes, scale, balance=self._balance, mean=mean)

    @cached_property
    def v(self) -> Fp8Tensor:
        """A copy of v's codes, with tokens as rows, and a view of its scales."""
        shapes, heads = self.shapes, (self.shapes.batch, self.shapes.kv_heads)
        packed = self._memory("v_codes", np.uint8, *heads, shapes.dim, shapes.key_blocks * 4, 16)
        keys = packed[..., _PLACES].reshape(*heads, shapes.dim, -1)
        codes = keys[:, :, : self.spec.head_dim_v, : shapes.kv_len].swapaxes(2, 3)
        added = self._of_channels("v_means")
        return self._tensor(
            "v", codes, self._of_channels("v_scales"),
            mean=added if self.recipe.center_v else None,
            residual=added * (not self.recipe.center_v) if self.recipe.residual_mean else None,
        )  # fmt: skip

    @property
    def first_values(self) -> Any:
        """A view of the values of the first 128 keys in 16 bit."""
        if not self.recipe.first_tile_16bit:
            return None
        shapes = self.shapes
        values = self._memory(
            "first_values", np.float16, shapes.batch, shapes.kv_heads, 128, shapes.dim
        )
        return values[:, :, : shapes.kv_len, : self.spec.head_dim]

    @property
    def array_shapes(self) -> list[tuple[int, ...]]:
        """Of the arrays that were quantised."""
        shapes, found = self.shapes, []
        for heads, tokens in (
            (shapes.q_heads, shapes.q_len),
            (shapes.kv_heads, shapes.kv_len),
            (shapes.kv_heads, shapes.kv_len),
        ):
            middle = (
                (tokens, heads) if self.layout == "bshd" and self.rank >= 3 else (heads, tokens)
            )
            found.append((shapes.batch, *middle, self.spec.head_dim)[4 - self.rank :])
        return found

    @property
    def mean_scores(self) -> Any:
        """Products of q with the mean that was subtracted from k."""
        if not self.recipe.center_k:
            return None
        shapes = self.shapes
        return self._numbers("lse_shifts", shapes.batch, shapes.q_heads, shapes.q_len)

    @property
    def _rotation(self) -> Rotation:
        return rotation_of(self.recipe, self.spec.head_dim, self.shapes.kv_heads)

    @property
    def _balance(self) -> Any:
        """From the factors of q, which have the signs and the norm of the rotation in them."""
        if not self.recipe.balance:
            return None
        factors = abs(self._of_channels("q_factors"))
        return factors * np.float32(self._rotation.block**0.5)

    def _tensor(self, role: str, codes: Any, scale: Any, **parts: Any) -> Fp8Tensor:
        layout = self.layout
        if layout == "bshd" and self.rank >= 3:
            codes = codes.swapaxes(1, 2)
        data = codes[(0,) * (4 - self.rank)]
        tensor = Fp8Tensor(
            role,
            data,
            scale,
            self.recipe,
            self.spec.head_dim,
            self.shapes.kv_heads,
            layout,
            **parts,
        )
        tensor.belong_to(self)
        return tensor

    def _codes(self, name: str, *shape: int) -> Any:
        """Of channels after rotation, without those that fill up the kernel's head dim."""
        codes = self._memory(name, np.uint8, *shape, self.shapes.dim)
        return codes[..., : self._rotation.dim]

    def _numbers(self, name: str, *shape: int) -> Any:
        return self._memory(name, np.float32, *shape)

    def _of_channels(self, name: str) -> Any:
        shapes = self.shapes
        numbers = self._numbers(name, shapes.batch, shapes.kv_heads, 1, shapes.dim)
        return numbers[..., : self.spec.head_dim]

    def _memory(self, name: str, dtype: Any, *shape: int) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self.shapes.places[name]
        return self.packed.memory[start : start + size].view(dtype).reshape(shape)
