"""Standard attention on any GPU: S = Q Kᵀ, a softmax pass, O = P V, with cuBLAS products.

The baseline that a fused kernel has to beat, and the family of last resort. The score matrix does
go through main memory, in chunks of query rows that keep it within a fixed workspace. Products take
16-bit operands with float32 results, so errors are those of the fused kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..operands import Operands
from ..plan import Plan, Tiling
from ..runtime import cublas, module
from ..runtime.cublas import Matrices
from ..runtime.device import Device
from ..runtime.graphs import lengths_on_device
from ..runtime.specialisation import Specialisation
from ..spec import AttentionSpec

# Large chunks hide the host's work, 0.2 ms a chunk; small cards get a 16th of their memory.
_WORKSPACE = 1 << 30
_LONG = 2048  # query rows from which causal masks and windows are worth cutting into
_BLOCKS = 8  # blocks of rows: causal then computes 9/16 of the scores instead of all
_MAX_MATRICES = 32768  # products of one cuBLAS call
_MAX_LENGTH = 1 << 30  # the softmax kernel counts the columns of a row in 32 bits
_THREADS = 256  # of a block
# Longer rows have larger blocks, so that fewer are in flight: each is read twice, and the second
# time an L2 of 50 MB should have it.
_LONG_ROW = 8192  # keys
_THREADS_LONG_ROW = 1024
_UNBOUNDED = 1 << 62
_CPP_TYPE = {"float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32"}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}

# struct Chunk of cuda_src/standard/softmax.cu
_POINTERS = (
    *("scores", "weights", "totals", "sums", "out"),
    *("lse", "mask", "bias", "q_lens", "kv_lens"),
)
_LONGS = ("left", "right", "q_len", "kv_len", "first_row", "first_key", "pitch")
_INTS = (
    *("group", "q_heads", "heads", "rows", "keys"),
    *("first_entry", "first_head", "head_dim_v", "all_rows", "top_left"),
)
_CHUNK = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(f"{name}_strides", np.int64, 4) for name in ("mask", "bias", "out")]
    + [(name, np.int64) for name in _LONGS]
    + [(name, np.int32) for name in _INTS]
    + [("softcap", np.float32)],
    align=True,
)


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = [] if device.kind == "cuda" else ["needs a GPU"]
    if spec.dtype not in _CPP_TYPE:
        reasons.append(f"takes {', '.join(_CPP_TYPE)}, not {spec.dtype}")
    if max(spec.q_len, spec.kv_len) > _MAX_LENGTH:
        reasons.append(f"takes lengths up to {_MAX_LENGTH}")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "any GPU: three passes over scores in main memory; no fused family takes this problem"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    group, pitch = max(spec.group, 1), _pitch(spec.kv_len)
    operand = _operand_dtype(spec.dtype, device)
    row_bytes = group * (pitch * (4 if operand == "float32" else 6) + 4 * (spec.head_dim_v + 1))
    workspace = min(_WORKSPACE, device.memory // 16 or _WORKSPACE)

    rows = spec.q_len
    bounded = (spec.left, spec.right) != (None, None)
    if bounded and not (spec.has_q_lens or spec.has_kv_lens) and rows >= _LONG:
        rows = -(-rows // _BLOCKS)  # each block of rows leaves out the keys that none of it sees
    rows = max(1, min(rows, workspace // row_bytes))
    matrices = min(workspace // (row_bytes * rows), spec.batch * spec.kv_heads, _MAX_MATRICES)
    if matrices > spec.kv_heads > 0:  # whole batch entries
        matrices -= matrices % spec.kv_heads
    matrices = max(matrices, 1)
    note = f"products of {operand}, results in float32"
    return Tiling(rows, spec.kv_len, matrices * group, matrices * rows * row_bytes, note)


def prepare(plan: Plan) -> Callable[[Operands], None]:
    return functools.partial(_run, plan)


def _run(plan: Plan, operands: Operands) -> None:
    call = _Call(plan, operands)
    spec = plan.spec
    matrices = plan.tiling.heads // max(spec.group, 1)
    entries, heads = max(matrices // spec.kv_heads, 1), min(matrices, spec.kv_heads)
    for entry in range(0, spec.batch, entries):
        for head in range(0, spec.kv_heads, heads):
            for row in range(0, spec.q_len, plan.tiling.q_rows):
                call.chunk(
                    slice(entry, min(entry + entries, spec.batch)),
                    slice(head, min(head + heads, spec.kv_heads)),
                    slice(row, min(row + plan.tiling.q_rows, spec.q_len)),
                )


class _Call:
    """One call: the kernels, the arguments that stay, and the three passes over a chunk."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        import cupy

        self.cupy, self.spec, self.operands = cupy, plan.spec, operands.views(plan.spec)
        self.dtype = _operand_dtype(plan.spec.dtype, plan.device)
        bias = plan.spec.bias
        self.softmax_rows, self.store_rows = _kernels(
            plan.device,
            self.dtype,
            "float32" if bias is None else bias.dtype,
            plan.spec.dtype,
        )
        self.q_lens, self.kv_lens = (
            None if lens is None else lengths_on_device(name, lens)
            for name, lens in (("q_lens", operands.q_lens), ("kv_lens", operands.kv_lens))
        )
        self.workspace = cupy.empty(plan.tiling.workspace, np.uint8)
        self.arguments = self._lasting_arguments()

    def chunk(self, entries: slice, heads: slice, rows: slice) -> None:
        """Attention of some batch entries, kv heads and query rows, over every key they see."""
        spec, operands = self.spec, self.operands
        q_heads = slice(heads.start * spec.group, heads.stop * spec.group)
        begin, end = 0, spec.kv_len
        if self.q_lens is None and self.kv_lens is None:
            begin, end = spec.key_range(rows.start, rows.stop - 1, spec.diagonal, spec.kv_len)
        if begin == end:
            self._bits(operands.out)[entries, q_heads, rows] = 0
            if operands.lse is not None:
                operands.lse[entries, q_heads, rows] = -np.inf
            return

        n_entries, n_heads, n_rows, n_keys = (
            part.stop - part.start for part in (entries, heads, rows, slice(begin, end))
        )
        matrices, stacked = n_entries * n_heads, spec.group * n_rows
        q = self._matrices(operands.q[entries, q_heads, rows], spec.group)
        k = self._matrices(operands.k[entries, heads, begin:end])
        v = self._matrices(self._values(entries, heads, slice(begin, end)))
        scores, weights, sums, totals = self._workspace_parts(matrices, stacked, _pitch(n_keys))

        arguments = self.arguments.copy()
        # The same bytes without field names, which CuPy would describe anew at each launch (48 us).
        packed = (arguments.view(f"V{_CHUNK.itemsize}"),)
        arguments["scores"], arguments["weights"] = scores.address, weights.address
        arguments["sums"], arguments["totals"] = sums.address, totals
        arguments["pitch"] = scores.row_step
        arguments["heads"], arguments["first_head"] = n_heads, heads.start
        arguments["rows"], arguments["first_row"] = n_rows, rows.start
        arguments["keys"], arguments["first_key"] = n_keys, begin
        arguments["first_entry"], arguments["all_rows"] = entries.start, matrices * stacked

        cublas.scores(q, k, scores, spec.scale, self.dtype)
        threads = _THREADS_LONG_ROW if n_keys > _LONG_ROW else _THREADS
        self.softmax_rows((matrices * stacked,), (threads,), packed)
        cublas.weighted_sums(weights, v, sums, self.dtype)
        rows_of_block = _THREADS // 32  # one warp each
        self.store_rows((-(-matrices * stacked // rows_of_block),), (_THREADS,), packed)

    def _workspace_parts(
        self, count: int, rows: int, pitch: int
    ) -> tuple[Matrices, Matrices, Matrices, int]:
        """Scores, weights, sums, and the address of the row sums, one after another in memory."""
        size, dim = count * rows, self.spec.head_dim_v
        start: int = self.workspace.data.ptr
        scores = Matrices(self.workspace, start, count, rows, pitch, pitch, rows * pitch)
        start += 4 * size * pitch
        weights = scores  # float32 weights take the place of their scores
        if self.dtype != "float32":
            weights = dataclasses.replace(scores, address=start)
            start += 2 * size * pitch
        sums = Matrices(self.workspace, start, count, rows, dim, dim, rows * dim)
        return scores, weights, sums, start + 4 * size * dim

    def _matrices(self, view: Any, group: int = 1) -> Matrices:
        """A 4-D view as matrices, rows of `group` heads stacked; a copy where strides forbid."""
        if self.dtype == "float32":
            view = view.astype(np.float32, copy=False)
        bits = self._bits(view)
        entries, heads, rows, dim = bits.shape
        item = bits.dtype.itemsize
        entry_step, head_step, row_step, step = (n // item for n in bits.strides)
        matrices = entries * (heads // group)
        matrix_step = group * head_step if heads > group else entry_step
        fits = (
            (step == 1 or dim == 1)
            and row_step >= dim
            and (group == 1 or head_step == rows * row_step)
            and (entries == 1 or heads == group or entry_step == heads * head_step)
            and matrix_step >= 0
            and all(n * item % 16 == 0 for n in (row_step, matrix_step))
            and bits.data.ptr % 16 == 0
            and row_step < 1 << 31
        )
        if fits:
            return Matrices(bits, bits.data.ptr, matrices, group * rows, dim, row_step, matrix_step)
        copy = self.cupy.ascontiguousarray(bits.reshape(matrices, group * rows, dim))
        return Matrices.of(copy if copy.data.ptr % 16 == 0 else copy.copy())

    def _values(self, entries: slice, heads: slice, keys: slice) -> Any:
        """V of a chunk; rows past kv_lens become 0, for a weight of 0 times NaN is NaN."""
        view = self.operands.v[entries, heads, keys]
        if self.kv_lens is None:
            return view
        index = self.cupy.arange(keys.start, keys.stop)
        used = index[None, :] < self.kv_lens[entries, None]
        bits = self._bits(view)
        kept = self.cupy.where(used[:, None, :, None], bits, bits.dtype.type(0))
        return kept.view(view.dtype)

    def _bits(self, view: Any) -> Any:
        """16-bit elements as integers: moving them needs no arithmetic on bfloat16."""
        return view.view(np.uint16) if view.dtype.itemsize == 2 else view

    def _lasting_arguments(self) -> np.ndarray[Any, Any]:
        """`struct Chunk` with what all chunks of the call share."""
        spec, operands = self.spec, self.operands
        arguments = np.zeros((), _CHUNK)
        viewed = {"mask": operands.mask, "bias": operands.bias, "out": operands.out}
        for name, array in viewed.items():
            if array is not None:
                arguments[name] = array.data.ptr
                arguments[f"{name}_strides"] = [n // array.dtype.itemsize for n in array.strides]
        flat = {"lse": operands.lse, "q_lens": self.q_lens, "kv_lens": self.kv_lens}
        for name, array in flat.items():
            if array is not None:
                arguments[name] = array.data.ptr
        arguments["left"] = _UNBOUNDED if spec.left is None else spec.left
        arguments["right"] = _UNBOUNDED if spec.right is None else spec.right
        arguments["top_left"] = spec.top_left
        arguments["softcap"] = spec.softcap or 0.0
        for name in ("q_len", "kv_len", "group", "q_heads", "head_dim_v"):
            arguments[name] = getattr(spec, name)
        return arguments


def _pitch(keys: int) -> int:
    """Elements between rows of scores: a multiple of 16 bytes in 16-bit, for cuBLAS's tensor-core
    kernels.
    """
    return -(-keys // 8) * 8


def _operand_dtype(dtype: str, device: Device) -> str:
    """cuBLAS multiplies bfloat16 from compute capability 8.0 on only."""
    lacks_bfloat16 = device.compute_capability is not None and device.compute_capability < (8, 0)
    return "float32" if dtype == "bfloat16" and lacks_bfloat16 else dtype


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return [
        _specialisation(_operand_dtype(dtype, device), bias, dtype)
        for dtype in dtypes
        if dtype in _CPP_TYPE and head_dims
        for bias in dict.fromkeys((dtype, "float32"))
    ]


@functools.cache
def _specialisation(weight: str, bias: str, out: str) -> Specialisation:
    name = "_".join(("cuflash_standard", *(_SHORT[dtype] for dtype in (weight, bias, out))))
    return Specialisation(
        "standard/softmax.cu",
        name,
        (
            ("weight", _CPP_TYPE[weight]),
            ("bias", _CPP_TYPE[bias]),
            ("out", _CPP_TYPE[out]),
            ("softmax_rows", f"{name}_softmax"),
            ("store_rows", f"{name}_store"),
        ),
    )


def _kernels(device: Device, weight: str, bias: str, out: str) -> tuple[Any, Any]:
    spec = _specialisation(weight, bias, out)
    loaded = module.load(spec, device)
    return loaded.function(f"{spec.name}_softmax"), loaded.function(f"{spec.name}_store")
