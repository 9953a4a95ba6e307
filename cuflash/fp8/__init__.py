"""8-bit attention: recipes, quantised tensors, and attention by them."""

from .attention import attention_fp8, attention_quantized
from .quantize import quantize_fp8
from .recipe import PRESETS, Fp8Recipe
from .tensors import Fp8Tensor, Fp8Tensors

__all__ = [
    "PRESETS",
    "Fp8Recipe",
    "Fp8Tensor",
    "Fp8Tensors",
    "attention_fp8",
    "attention_quantized",
    "quantize_fp8",
]
