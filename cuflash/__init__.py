"""Exact attention for CuPy and NumPy arrays, without the score matrix in main memory."""

from .api import attention, explain
from .arrays import ArrayInfo
from .backward import attention_backward, attention_vjp
from .environment import info
from .fp8 import Fp8Recipe, attention_fp8, quantize_fp8
from .merge import merge_states
from .plan import Plan
from .precompile import warmup
from .traffic import io_bytes
from .version import __version__

__all__ = [
    "ArrayInfo",
    "Fp8Recipe",
    "Plan",
    "__version__",
    "attention",
    "attention_backward",
    "attention_fp8",
    "attention_vjp",
    "explain",
    "info",
    "io_bytes",
    "merge_states",
    "quantize_fp8",
    "warmup",
]
