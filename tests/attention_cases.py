"""The attention cases of `data/attention_cases.json`: how each becomes a call, and its true answer.

A case is a plain dictionary. `forward_call` turns it into one call of `cuflash.attention`, `run`
makes that call on a backend, and `reference` computes the answer in float64, sharing no code with
the library. `case_recipes` builds the inputs and `case_expectations` judges the results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from case_recipes import HostArray, lay_out, number, read_values

import cuflash

CASE_FILE = Path(__file__).parent / "data" / "attention_cases.json"

Case = Mapping[str, Any]

_CASE_FIELDS = {
    "id", "kind", "source", "op", "dtype", "seed", "inputs", "options", "backends", "memory_gib",
    "needs", "sample", "known", "expect", "also", "forward", "why",
}  # fmt: skip
_FORWARD_FIELDS = {"expect", "also", "why"}
# Name in the case of the arrays that are q, k and v of the call.
_OPS = {
    "attention": ("q", "k", "v"),
    "attention_backward": ("q", "k", "v"),
    "attention_varlen": ("q", "k", "v"),
    "attention_with_kvcache": ("q", "k_cache", "v_cache"),
}
# Options that shape the arrays, the lengths or the mask of the call.
_ARRAY_OPTIONS = {
    "block_mask", "block_size", "cache_cut_to", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k",
}  # fmt: skip
# Options that say how another function works; the forward's answer does not depend on them.
FORWARD_IGNORES = {"backward", "num_splits"}
_NUMBERS_IN_WORDS: dict[Any, Any] = {
    "python float 1.0": 1.0,
    "numpy.float32(1)": np.float32(1),
    "numpy.float64(1)": np.float64(1),
    "numpy.int64(1)": np.int64(1),
}


def load_cases() -> tuple[list[Case], dict[str, str]]:
    """The cases, and the reason of each case that can't be run yet."""
    content = json.loads(CASE_FILE.read_text(encoding="utf-8"))
    for case in content["cases"]:
        unknown = set(case) - _CASE_FIELDS | set(case.get("forward", {})) - _FORWARD_FIELDS
        if unknown:
            raise ValueError(f"{case['id']}: unknown fields {sorted(unknown)}")
    return content["cases"], content["not_yet"]


def takes_gradients(case: Case) -> bool:
    """Whether a case is judged by gradients, at least in part."""
    return case["op"] == "attention_backward" or bool(case["options"].get("backward"))


def has_forward(case: Case) -> bool:
    """Whether a case says what is expected of its forward alone."""
    return not takes_gradients(case) or "forward" in case


# --- from a case to a call ----------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Where the rows of packed sequences lie in the batch they are padded to."""

    lengths: tuple[int, ...]
    stored: tuple[int, ...]
    """Rows kept of each sequence: its length, and for the last one also the rows after its end."""

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], total: int) -> Packing:
        """Packing of `total` rows, of which sequence b is cu_seqlens[b] to cu_seqlens[b + 1]."""
        lengths = tuple(int(n) for n in np.diff(cu_seqlens))
        stored = (*lengths[:-1], total - cu_seqlens[-2])
        return cls(lengths, stored)

    def pad(self, packed: np.ndarray) -> np.ndarray:
        """The sequences as (batch, seq, heads, head_dim), padded with NaN."""
        shape = (len(self.stored), max(self.stored), *packed.shape[1:])
        padded = np.full(shape, np.nan, packed.dtype)
        parts = np.split(packed, np.cumsum(self.stored)[:-1])
        for entry, part in zip(padded, parts, strict=True):
            entry[: len(part)] = part
        return padded

    def pack(self, padded: np.ndarray) -> np.ndarray:
        """The stored rows of (batch, seq, heads, head_dim), one sequence after the other."""
        return np.concatenate([x[:n] for x, n in zip(padded, self.stored, strict=True)])

    def padding(self, padded: np.ndarray) -> np.ndarray:
        """The rows that `pack` leaves out."""
        return np.concatenate([x[n:] for x, n in zip(padded, self.stored, strict=True)])


@dataclass(frozen=True)
class ForwardCall:
    """One forward call: q, k and v as (batch, seq, heads, head_dim) and the options of its case;
    also dout, where the case gives it.
    """

    arrays: dict[str, HostArray]
    options: Mapping[str, Any]
    q_lens: np.ndarray | None = None
    kv_lens: np.ndarray | None = None
    packing: Packing | None = None
    key_packing: Packing | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].view.shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.shape("q")[:-1], self.shape("v")[-1])


def forward_call(case: Case) -> ForwardCall:
    """The forward call of a case; packed sequences are padded to a batch with lengths."""
    names = _OPS[case["op"]]
    unused = set(case["inputs"]) - set(names) - {"dout"}
    if unused:
        raise ValueError(f"{case['id']}: the forward call has no use for {sorted(unused)}")
    named = dict(zip("qkv", names, strict=True))
    if "dout" in case["inputs"]:
        named["dout"] = "dout"
    specs = {role: case["inputs"][name] for role, name in named.items()}
    values = {
        role: read_values(name, specs[role], case["dtype"], case["seed"])
        for role, name in named.items()
    }
    layouts = {role: spec.get("layout") for role, spec in specs.items()}
    options = case["options"]
    if case["op"] == "attention_varlen":
        return _packed_call(values, layouts, options)
    call = ForwardCall(lay_out(values, layouts), options)
    if case["op"] == "attention_with_kvcache":
        return _cache_call(call, options)
    return call


def _packed_call(
    values: Mapping[str, np.ndarray], layouts: Mapping[str, Any], options: Mapping[str, Any]
) -> ForwardCall:
    rows = Packing.of(options["cu_seqlens_q"], len(values["q"]))
    keys = Packing.of(options["cu_seqlens_k"], len(values["k"]))
    padded = {name: (keys if name in "kv" else rows).pad(x) for name, x in values.items()}
    return ForwardCall(
        lay_out(padded, layouts),
        options,
        q_lens=np.asarray(rows.lengths, np.int32),
        kv_lens=np.asarray(keys.lengths, np.int32),
        packing=rows,
        key_packing=keys,
    )


def _cache_call(call: ForwardCall, options: Mapping[str, Any]) -> ForwardCall:
    arrays = dict(call.arrays)
    if "cache_cut_to" in options:
        for name in ("k", "v"):
            whole = arrays[name]
            arrays[name] = HostArray(whole.buffer, whole.view[:, : options["cache_cut_to"]])
    kv_lens = np.asarray(options["cache_seqlens"], np.int32)
    return dataclasses.replace(call, arrays=arrays, kv_lens=kv_lens)


def scale_of(options: Mapping[str, Any], head_dim: int) -> Any:
    """The scale of a case, which may be given in words to ask for a certain type of number."""
    scale = options.get("scale", head_dim**-0.5)
    return _NUMBERS_IN_WORDS[scale] if isinstance(scale, str) else scale


def keyword_options(call: ForwardCall) -> dict[str, Any]:
    """Keyword arguments of `cuflash.attention`, all but the arrays."""
    given: dict[str, Any] = {}
    for name, value in call.options.items():
        if name in ("causal", "return_lse", "deterministic"):
            given[name] = value
        elif name == "window":
            given[name] = tuple(None if bound == -1 else bound for bound in value)
        elif name == "softcap":
            given[name] = value or None
        elif name == "scale":
            given[name] = scale_of(call.options, call.shape("q")[-1])
        elif name == "dropout_p":
            given[name] = number(value)
        elif name not in _ARRAY_OPTIONS | FORWARD_IGNORES:
            raise ValueError(f"unknown option {name!r}")
    return given


def dense_mask(call: ForwardCall) -> np.ndarray | None:
    """The block mask repeated to one boolean per (batch, head, query, key)."""
    if "block_mask" not in call.options:
        return None
    blocks = np.asarray(call.options["block_mask"], bool)
    rows, keys = call.options["block_size"]
    whole = blocks.repeat(rows, axis=2).repeat(keys, axis=3)
    return np.ascontiguousarray(whole[:, :, : call.shape("q")[1], : call.shape("k")[1]])


# --- backends -----------------------------------------------------------------------------------


class NumpyBackend:
    """Arrays of the host, as they are."""

    name = "numpy"

    def place(self, arrays: Mapping[str, HostArray]) -> dict[str, Any]:
        """The views, over memory of this backend."""
        return {name: array.view for name, array in arrays.items()}

    def asarray(self, values: np.ndarray) -> Any:
        return values

    def to_host(self, array: Any) -> np.ndarray:
        assert type(array) is np.ndarray, f"got {type(array)}; expected numpy.ndarray"
        return array

    def poison(self, nbytes: Sequence[int]) -> None:
        """Nothing: the host's allocator is not ours to prepare."""

    def disturb(self) -> None:
        """Nothing: calls on the host wait for one another."""

    def failure(self) -> str | None:
        """Why a simple operation no longer works; None while it does."""
        return None


class CudaBackend:
    """Arrays of the current CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def place(self, arrays: Mapping[str, HostArray]) -> dict[str, Any]:
        """The same views as on the host, over a copy of each whole buffer."""
        buffers = {id(array.buffer): array.buffer for array in arrays.values()}
        copies = {
            key: self.cupy.asarray(buffer.reshape(-1).view(np.uint8))
            for key, buffer in buffers.items()
        }
        return {
            name: self.cupy.ndarray(
                array.view.shape,
                array.view.dtype,
                memptr=copies[id(array.buffer)].data + array.offset,
                strides=array.view.strides,
            )
            for name, array in arrays.items()
        }

    def asarray(self, values: np.ndarray) -> Any:
        return self.cupy.asarray(values)

    def to_host(self, array: Any) -> np.ndarray:
        assert type(array) is self.cupy.ndarray, f"got {type(array)}; expected cupy.ndarray"
        host: np.ndarray = self.cupy.asnumpy(array)
        return host

    def poison(self, nbytes: Sequence[int]) -> None:
        """Leave blocks of these sizes full of NaN in the memory pool, for the call to take."""
        blocks = [self.cupy.full(n, 0xFF, np.uint8) for n in nbytes]
        del blocks

    def disturb(self) -> None:
        """Start other work on a second stream, which takes multiprocessors from the next call."""
        with self.cupy.cuda.Stream(non_blocking=True):
            square = self.cupy.ones((1024, 1024), np.float32)
            for _ in range(8):
                square = square @ square * np.float32(1 / 1024)

    def failure(self) -> str | None:
        """Why a simple operation no longer works; None while it does."""
        try:
            total = int(self.cupy.arange(8).sum())
        except (
            self.cupy.cuda.runtime.CUDARuntimeError,
            self.cupy.cuda.driver.CUDADriverError,
        ) as error:
            return str(error)
        return None if total == 28 else f"sum of 0..7 is {total}"


Backend = NumpyBackend | CudaBackend


@dataclass(frozen=True)
class Outcome:
    """What a call returned, on the host, or raised."""

    outputs: dict[str, np.ndarray]
    error: Exception | None = None


def run(call: ForwardCall, backend: Backend, kernel: str) -> Outcome:
    """Make the call; whatever it raises is part of the outcome."""
    arrays = backend.place(call.arrays)
    mask = dense_mask(call)
    array_options = {"q_lens": call.q_lens, "kv_lens": call.kv_lens, "mask": mask}
    options = keyword_options(call) | {
        name: backend.asarray(x) for name, x in array_options.items() if x is not None
    }
    rows = int(np.prod(call.out_shape[:-1]))
    item_size = call.arrays["q"].view.dtype.itemsize
    backend.poison([rows * call.out_shape[-1] * item_size, rows * np.dtype(np.float32).itemsize])
    try:
        result = cuflash.attention(
            arrays["q"], arrays["k"], arrays["v"], layout="bshd", kernel=kernel, **options
        )
        # Faults of a kernel surface when its result is read.
        results = result if options.get("return_lse") else (result,)
        host = [backend.to_host(x) for x in results]
    except Exception as error:
        return Outcome({}, error)
    return Outcome(dict(zip(("out", "lse"), host, strict=False)))


# --- reference ----------------------------------------------------------------------------------


def reference(
    call: ForwardCall, batches: Sequence[int], rows: Sequence[int]
) -> dict[str, np.ndarray]:
    """`out` (batch, seq, heads, dim) and `lse` (batch, heads, seq) of some entries, in float64."""
    _, _, heads, head_dim_v = call.out_shape
    out = np.zeros((len(batches), len(rows), heads, head_dim_v))
    lse = np.full((len(batches), heads, len(rows)), -np.inf)
    group = heads // max(call.shape("k")[2], 1)
    for at, batch in enumerate(batches):
        q_len = call.shape("q")[1] if call.q_lens is None else int(call.q_lens[batch])
        kv_len = call.shape("k")[1] if call.kv_lens is None else int(call.kv_lens[batch])
        used = np.flatnonzero(np.asarray(rows) < q_len)
        q = call.arrays["q"].view[batch, np.asarray(rows)[used]].astype(np.float64)
        k = call.arrays["k"].view[batch, :kv_len].astype(np.float64)
        v = call.arrays["v"].view[batch, :kv_len].astype(np.float64)
        for head in range(heads):
            visible = _visible(call, batch, head, np.asarray(rows)[used], q_len, kv_len)
            out[at, used, head], lse[at, head, used] = _attend(
                q[:, head], k[:, head // group], v[:, head // group], visible, call.options
            )
    return {"out": out, "lse": lse}


def _visible(
    call: ForwardCall, batch: int, head: int, rows: np.ndarray, q_len: int, kv_len: int
) -> np.ndarray:
    keys = np.arange(kv_len)
    distance = keys[None, :] - (rows[:, None] + kv_len - q_len)
    visible = np.ones((len(rows), kv_len), bool)
    if call.options.get("causal"):
        visible &= distance <= 0
    left, right = call.options.get("window", (-1, -1))
    if left != -1:
        visible &= distance >= -left
    if right != -1:
        visible &= distance <= right
    if "block_mask" in call.options:
        blocks = np.asarray(call.options["block_mask"], bool)
        block_rows, block_keys = call.options["block_size"]
        of_head = blocks[min(batch, len(blocks) - 1), min(head, blocks.shape[1] - 1)]
        visible &= of_head[np.ix_(rows // block_rows, keys // block_keys)]
    return visible


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    options: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    scores = float(scale_of(options, q.shape[-1])) * (q @ k.T)
    softcap = options.get("softcap", 0)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=1, initial=-np.inf)
    # A row without keys has no largest score; any finite shift keeps its weights 0.
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - shift[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    return (weights @ v) / np.where(total == 0, 1.0, total)[:, None], lse
