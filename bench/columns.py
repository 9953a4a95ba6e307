"""The columns of each bench: what runs in which process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .processes import Spec

OURS = "cuflash"
JUDGE = "judge"
_FA3, _FA4 = "flash_attn_interface", "flash_attn.cute"
_PEERS = "bench.peers"


def _torch(backend: str) -> Spec:
    return Spec(f"{_PEERS}.torch_sdpa", options={"backend": backend})


def _flash(module: str, bits: int = 16) -> Spec:
    return Spec(f"{_PEERS}.flash_attention", options={"module": module, "bits": bits})


def _fp8(recipe: str, part: str) -> Spec:
    return Spec(f"{_PEERS}.ours_fp8", options={"recipe": recipe, "part": part})


def _ours(kernel: str, place: str = "cuda") -> Spec:
    return Spec(f"{_PEERS}.ours", place, {"kernel": kernel})


# Of 16 bits on a GPU. The first that a file has is what `compare` compares with.
PEERS = {
    "fa3": _flash(_FA3),
    "torch-cudnn": _torch("CUDNN_ATTENTION"),
    "cudnn": Spec(f"{_PEERS}.cudnn_graph"),
    "fa4": _flash(_FA4),
    "torch-flash": _torch("FLASH_ATTENTION"),
    "torch-efficient": _torch("EFFICIENT_ATTENTION"),
    "standard": _ours("standard"),
}
CPU_PEERS = {"blas": Spec(f"{_PEERS}.blas", "cpu")}
RECIPES = ("f8", "i8", "f8+", "i8+")
FP8_PEERS = {"fa3": _flash(_FA3, 8), "cudnn": Spec(f"{_PEERS}.cudnn_graph", options={"bits": 8})}
CEILINGS = {
    name: Spec(f"{_PEERS}.ceilings", options={"what": name})
    for name in ("matmul float16", "matmul bfloat16", "matmul e4m3", "copy")
}


def _ours_backward(kernel: str, deterministic: bool = False) -> Spec:
    options = {"kernel": kernel, "deterministic": deterministic}
    return Spec(f"{_PEERS}.ours_backward", options=options)


def _torch_backward(backend: str) -> Spec:
    return Spec(f"{_PEERS}.torch_backward", options={"backend": backend})


# Of the backward pass of 16 bits; some are ours.
OURS_BACKWARD = (OURS, "deterministic", "sm80")
BACKWARD_PEERS = {
    "torch-cudnn": _torch_backward("CUDNN_ATTENTION"),
    "torch-flash": _torch_backward("FLASH_ATTENTION"),
    "sm80": _ours_backward("sm80"),
    "deterministic": _ours_backward("auto", deterministic=True),
}


def against(specs: Mapping[str, Spec], tree: str) -> dict[str, Spec]:
    """The same columns of ours by the cuflash of another source tree."""
    return {
        f"{name} against": replace(spec, tree=tree)
        for name, spec in specs.items()
        if spec.module.startswith(f"{_PEERS}.ours")
    }


def judge(place: str) -> Spec:
    """Knows exact rows."""
    return Spec(f"{_PEERS}.judge", place)


def forward(kernel: str, place: str, peers: Iterable[str]) -> dict[str, Spec]:
    """Ours by a kernel, and these peers."""
    known = PEERS if place == "cuda" else CPU_PEERS
    return {OURS: _ours(kernel, place), **{name: known[name] for name in peers}}


def backward(kernel: str, peers: Iterable[str]) -> dict[str, Spec]:
    """Ours by a kernel, and these peers."""
    return {OURS: _ours_backward(kernel), **{name: BACKWARD_PEERS[name] for name in peers}}


def fp8(recipes: Iterable[str], peers: Iterable[str]) -> dict[str, Spec]:
    """Attention to codes by each recipe, and these peers with e4m3."""
    ours = {recipe: _fp8(recipe, "attend") for recipe in recipes}
    return ours | {name: FP8_PEERS[name] for name in peers}


def quantize(recipes: Iterable[str]) -> dict[str, Spec]:
    """Quantising and the whole by each recipe, beside a copy and 16 bits."""
    found = {"copy": CEILINGS["copy"], "16 bits": _ours("auto")}
    for recipe in recipes:
        found[f"quantise {recipe}"] = _fp8(recipe, "quantise")
        found[f"whole {recipe}"] = _fp8(recipe, "whole")
    return found
