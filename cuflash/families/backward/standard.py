"""The backward pass of standard attention on any GPU: array operations and products in float32.

The baseline that a fused kernel has to beat, and the family of last resort. Scores are computed
again from q, k and LSE in chunks of query rows that keep them within a fixed workspace, and do go
through main memory. Nothing here is CuPy's alone, so that tests run it on NumPy arrays.

Method: as in `cuflash.reference_backward`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays import bits, module_of
from ...operands import BackwardOperands
from ...plan import Plan, Tiling
from ...runtime.device import Device
from ...runtime.specialisation import Specialisation
from ...spec import AttentionSpec

_DTYPES = ("float16", "bfloat16", "float32")
_WORKSPACE = 1 << 30  # small cards get a 16th of their memory
_LONG = 2048  # query rows from which causal masks and windows are worth cutting into
_BLOCKS = 8  # blocks of rows: causal then computes 9/16 of the scores instead of all
_MAX_MATRICES = 32768  # products of one cuBLAS call
_MAX_LENGTH = 1 << 30  # cuBLAS counts rows in 32 bits


def supports(spec: AttentionSpec, device: Device) -> list[str]:
    reasons = [] if device.kind == "cuda" else ["needs a GPU"]
    if spec.dtype not in _DTYPES:
        reasons.append(f"takes {', '.join(_DTYPES)}, not {spec.dtype}")
    if max(spec.q_len * max(spec.group, 1), spec.kv_len) > _MAX_LENGTH:
        reasons.append(f"takes up to {_MAX_LENGTH} keys, and rows of a group of heads")
    return reasons


def why(spec: AttentionSpec, device: Device) -> str:
    return "any GPU: scores again in main memory, products of float32; no fused one has this"


def plan(spec: AttentionSpec, device: Device) -> Tiling:
    group, dims = max(spec.group, 1), spec.head_dim + spec.head_dim_v
    # float32 of scores, of their gradients and of one step's result; flags of who sees whom.
    a_score = 4 * (3 + (spec.softcap is not None) + (spec.bias is not None)) + 3
    row_bytes = group * (spec.kv_len * a_score + 4 * 4 * dims)
    head_bytes = 3 * 4 * spec.kv_len * dims  # keys and values, their gradients, a chunk's share
    workspace = min(_WORKSPACE, device.memory // 16 or _WORKSPACE)

    rows = spec.q_len
    bounded = (spec.left, spec.right) != (None, None)
    if bounded and not (spec.has_q_lens or spec.has_kv_lens) and rows >= _LONG:
        rows = -(-rows // _BLOCKS)  # each block of rows leaves out the keys that none of it sees
    rows = max(1, min(rows, (workspace - head_bytes) // row_bytes))
    matrices = workspace // (row_bytes * rows + head_bytes)
    matrices = min(matrices, spec.batch * spec.kv_heads, _MAX_MATRICES)
    if matrices > spec.kv_heads > 0:  # whole batch entries
        matrices -= matrices % spec.kv_heads
    matrices = max(matrices, 1)
    total = matrices * (row_bytes * rows + head_bytes)
    return Tiling(rows, spec.kv_len, matrices * group, total, "products of float32")


def prepare(plan: Plan) -> Callable[[BackwardOperands], None]:
    return functools.partial(_run, plan)


def specialisations(
    device: Device, head_dims: Sequence[int], dtypes: Sequence[str]
) -> list[Specialisation]:
    return []


def _run(plan: Plan, operands: BackwardOperands) -> None:
    spec = plan.spec
    viewed = operands.views(spec)
    matrices = plan.tiling.heads // max(spec.group, 1)
    entries, heads = max(matrices // spec.kv_heads, 1), min(matrices, spec.kv_heads)
    for entry in range(0, spec.batch, entries):
        for head in range(0, spec.kv_heads, heads):
            part = _Heads(
                spec,
                viewed,
                slice(entry, min(entry + entries, spec.batch)),
                slice(head, min(head + heads, spec.kv_heads)),
            )
            for row in range(0, spec.q_len, plan.tiling.q_rows):
                part.add_rows(slice(row, min(row + plan.tiling.q_rows, spec.q_len)))
            part.store()


class _Heads:
    """The gradients of some batch entries and kv heads. Rows of a group's heads are stacked, so
    that all arrays are (entries * kv heads, rows or keys, dim).
    """

    def __init__(
        self, spec: AttentionSpec, operands: BackwardOperands, entries: slice, heads: slice
    ) -> None:
        self.xp = module_of(operands.q)
        self.spec, self.operands = spec, operands
        self.entries, self.heads = entries, heads
        self.q_heads = slice(heads.start * spec.group, heads.stop * spec.group)
        self.counts = (entries.stop - entries.start, heads.stop - heads.start)
        self.q_lens = self._lengths(operands.q_lens, spec.q_len)
        self.kv_lens = self._lengths(operands.kv_lens, spec.kv_len)
        self.k, self.v = (self._keys(array) for array in (operands.k, operands.v))
        self.dk, self.dv = self.xp.zeros_like(self.k), self.xp.zeros_like(self.v)

    def add_rows(self, rows: slice) -> None:
        """dq of some query rows, and their share of dk and dv."""
        xp, spec, operands = self.xp, self.spec, self.operands
        begin, end = 0, spec.kv_len
        if self.q_lens is None and self.kv_lens is None:
            begin, end = spec.key_range(rows.start, rows.stop - 1, spec.diagonal, spec.kv_len)
        if begin == end:
            bits(operands.dq)[self.entries, self.q_heads, rows] = 0
            return
        seen = slice(begin, end)
        hidden = self._hidden(rows, seen)
        k, v = self.k[:, seen], self.v[:, seen]
        q, dout, out = (self._rows(a, rows) for a in (operands.q, operands.dout, operands.out))
        q = q * np.float32(spec.scale)
        lse = operands.lse[self.entries, self.q_heads, rows].reshape(*q.shape[:2], 1)
        # exp(-inf - lse) of a row without keys is 0 then, not NaN.
        lse = xp.where(xp.isneginf(lse), np.float32(np.inf), lse)
        delta = (dout * out).sum(axis=-1, keepdims=True)

        scores = q @ k.swapaxes(1, 2)
        slopes = None
        if spec.softcap is not None:
            scores /= np.float32(spec.softcap)
            xp.tanh(scores, out=scores)
            slopes = 1 - scores * scores
            scores *= np.float32(spec.softcap)
        if operands.bias is not None:
            bias = operands.bias[self.entries, self.q_heads, rows, seen]
            scores += self._float32(bias).reshape(scores.shape)
        scores -= lse
        weights = xp.exp(scores, out=scores)
        by_score = dout @ v.swapaxes(1, 2)
        by_score -= delta
        by_score *= weights
        if slopes is not None:
            by_score *= slopes
        if hidden is not None:
            for values in (weights, by_score):  # NaN too
                xp.copyto(values.reshape(hidden.shape), 0.0, where=hidden)

        dq = by_score @ k
        dq *= np.float32(spec.scale)
        self._store(operands.dq[self.entries, self.q_heads, rows], dq)
        self.dk[:, seen] += by_score.swapaxes(1, 2) @ q  # q holds the scale already
        self.dv[:, seen] += weights.swapaxes(1, 2) @ dout

    def store(self) -> None:
        """Round the sums of all rows into dk and dv."""
        for destination, sums in ((self.operands.dk, self.dk), (self.operands.dv, self.dv)):
            self._store(destination[self.entries, self.heads], sums)

    def _hidden(self, rows: slice, keys: slice) -> Any:
        """Which rows do not see which keys, as (entries, kv heads, group, rows, keys), broadcast;
        None where all see all.
        """
        xp, spec = self.xp, self.spec
        i, j = xp.arange(rows.start, rows.stop)[:, None], xp.arange(keys.start, keys.stop)
        q_lens, kv_lens = (
            None if lens is None else lens[:, None, None, None, None]
            for lens in (self.q_lens, self.kv_lens)
        )
        diagonal: Any = 0
        if not spec.top_left:
            diagonal = (spec.kv_len if kv_lens is None else kv_lens) - (
                spec.q_len if q_lens is None else q_lens
            )
        found = []
        if spec.left is not None:
            found.append(j < i + (diagonal - spec.left))
        if spec.right is not None:
            found.append(j > i + (diagonal + spec.right))
        if q_lens is not None:
            found.append(i >= q_lens)
        if kv_lens is not None:
            found.append(j >= kv_lens)
        if self.operands.mask is not None:
            mask = self.operands.mask[self.entries, self.q_heads, rows, keys]
            found.append(~mask.reshape(*self.counts, spec.group, *mask.shape[2:]))
        if not found:
            return None
        shape = (*self.counts, spec.group, rows.stop - rows.start, keys.stop - keys.start)
        return xp.broadcast_to(functools.reduce(operator.or_, found), shape)

    def _lengths(self, lens: Any, most: int) -> Any:
        """Used lengths of the entries, next to the arrays; values beyond the length count as it."""
        if lens is None:
            return None
        return self.xp.clip(self.xp.asarray(lens)[self.entries].astype(np.int64), 0, most)

    def _rows(self, array: Any, rows: slice) -> Any:
        """Rows of an array like q in float32, 0 past `q_lens`."""
        part = self._float32(array[self.entries, self.q_heads, rows])
        return self._stacked(part, self.q_lens, rows.start)

    def _keys(self, array: Any) -> Any:
        """All keys or values in float32, 0 past `kv_lens`."""
        return self._stacked(self._float32(array[self.entries, self.heads]), self.kv_lens, 0)

    def _stacked(self, part: Any, lens: Any, first: int) -> Any:
        """One matrix for each entry and kv head. What lies past the lengths becomes 0, for a weight
        of 0 times NaN is NaN.
        """
        if lens is not None:
            used = self.xp.arange(first, first + part.shape[2]) < lens[:, None]
            part = self.xp.where(used[:, None, :, None], part, np.float32(0))
        _, heads, length, dim = part.shape
        n_entries, n_heads = self.counts
        stacked = part.reshape(n_entries * n_heads, heads // n_heads * length, dim)
        return self.xp.ascontiguousarray(stacked)

    def _float32(self, array: Any) -> Any:
        if array.dtype.name != "bfloat16":
            return array.astype(np.float32, copy=False)
        # float32 with the same upper half.
        return (bits(array).astype(np.uint32) << np.uint32(16)).view(np.float32)

    def _store(self, destination: Any, sums: Any) -> None:
        """Write float32 results, stacked as here, rounded to the nearest number, ties to even."""
        sums = sums.reshape(destination.shape)
        if destination.dtype.name != "bfloat16":
            destination[...] = sums.astype(destination.dtype, copy=False)
            return
        word = sums.view(np.uint32)
        up = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        # Rounding up could carry a NaN over into Inf or 0.
        rounded = self.xp.where(self.xp.isnan(sums), word | np.uint32(1 << 22), word + up)
        bits(destination)[...] = (rounded >> np.uint32(16)).astype(np.uint16)
