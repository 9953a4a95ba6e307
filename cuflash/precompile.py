"""`warmup()`: compile kernels ahead of time, for any architecture, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

from . import families
from .arrays import ArrayInfo
from .runtime import cache, compiler
from .runtime.compiler import CompileError
from .runtime.device import Device, cuda_devices, named, unavailable_reason
from .runtime.specialisation import Specialisation
from .spec import MAX_HEAD_DIM, AttentionSpec, Options
from .validate import GPU_DTYPES, build_spec, one_of
from .validate_backward import BackwardInfos, build_backward_spec

_T = TypeVar("_T", str, int)

_MAX_THREADS = 8  # a compilation takes some hundred megabytes


@dataclass(frozen=True, slots=True)
class Module:
    """One module to compile: a family's specialisation and the compiler's target."""

    family: str
    specialisation: Specialisation
    arch: str


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one module. `error` is empty where it is in the cache now.

    `seconds` is what compiling took, also where an earlier process did it (`cached`).
    """

    family: str
    name: str
    arch: str
    seconds: float
    cached: bool
    error: str = ""


def warmup(
    arch: str | Sequence[str] | None = None,
    *,
    family: str | Sequence[str] | None = None,
    head_dim: int | Sequence[int] | None = None,
    dtype: str | Sequence[str] | None = None,
    progress: Callable[[Built, int, int], None] | None = None,
) -> list[Built]:
    """Compile into the cache folder all that later calls may need, so that none of them waits.

    Works on machines without a GPU or driver, such as the one that builds a container image; the
    compiler's version decides, with all else, which modules a later process finds. Compiles on
    several threads.

    Parameters
    ----------
    arch : str or sequence of str, optional
        Compute capabilities, such as ``"sm_90"`` or ``"8.6"``; those of this machine's GPUs where
        left out.
    family : str or sequence of str, optional
        Kernel families; all where left out.
    head_dim : int or sequence of int, optional
        Head dimensions of the problems to come; all where left out.
    dtype : str or sequence of str, optional
        Their dtypes; all where left out.
    progress : callable, optional
        Called as ``progress(built, done, total)`` after each module, in the calling thread.

    Returns
    -------
    list of Built
        One for each module, failures included: see ``error``.

    Raises
    ------
    ValueError
        For an unknown name, or where no architecture is given and no GPU is here.
    RuntimeError
        Where CuPy or its NVRTC is missing, or that NVRTC does not know the architecture.

    Examples
    --------
    >>> import cuflash
    >>> failed = [b for b in cuflash.warmup("sm_80", dtype="float16") if b.error]  # doctest: +SKIP
    """
    _require_compiler()
    modules = list_modules(
        _targets(_sequence(arch)), _sequence(family), _sequence(head_dim), _sequence(dtype)
    )
    results = []
    for built in _build_all(modules):
        results.append(built)
        if progress is not None:
            progress(built, len(results), len(modules))
    return results


def list_modules(
    devices: Iterable[Device],
    family_names: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    dtypes: Sequence[str] = (),
) -> list[Module]:
    """Every module that a family may load on these devices, each once; an empty choice is all."""
    names = [one_of("family", name, families.BUILT) for name in family_names or families.BUILT]
    for dim in head_dims:
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim: got {dim}; expected 1 to {MAX_HEAD_DIM}")
    dims = head_dims or range(1, MAX_HEAD_DIM + 1)
    kinds = [one_of("dtype", dtype, GPU_DTYPES) for dtype in dtypes or GPU_DTYPES]
    found: dict[Module, None] = {}
    for device in devices:
        capability = device.compute_capability
        assert capability is not None
        for name in names:
            for spec in _of_family(name, device, dims, kinds):
                arch = compiler.loadable_architecture(capability, spec.exact_arch)
                found[Module(name, spec, arch)] = None
    return list(found)


def _of_family(
    name: str, device: Device, dims: Sequence[int], dtypes: Sequence[str]
) -> Iterator[Specialisation]:
    """What both passes of a family may compile for a device: of those problems that they would take
    there.
    """
    passes: list[tuple[families.Family, Callable[[ArrayInfo], AttentionSpec]]] = [
        (families.load(name), _forward_spec)
    ]
    if name in families.BACKWARD_BUILT:
        passes.append((families.load_backward(name), _backward_spec))
    for family, spec_of in passes:
        for dtype in dtypes:
            taken = []
            for dim in dims:
                array = ArrayInfo((1, 1, 128, dim), dtype, "cuda:0")
                if not family.supports(spec_of(array), device):
                    taken.append(dim)
            yield from family.specialisations(device, taken, [dtype])


def _forward_spec(array: ArrayInfo) -> AttentionSpec:
    return build_spec(array, array, array, Options())


def _backward_spec(array: ArrayInfo) -> AttentionSpec:
    return build_backward_spec(array, array, array, BackwardInfos(), Options())


def _build_all(modules: Sequence[Module]) -> Iterator[Built]:
    """Results in the order in which they are ready."""
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS))
    try:
        for future in as_completed([pool.submit(_build, module) for module in modules]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _build(module: Module) -> Built:
    spec, arch = module.specialisation, module.arch
    seconds, cached, error = 0.0, False, ""
    try:
        entry = cache.get(spec, arch, show_progress=False)
    except (CompileError, OSError, ValueError) as problem:
        error = str(problem)
    else:
        seconds, cached = entry.seconds, entry.hit
        if entry.path.parent != cache.folder():
            error = f"compiled, but {cache.folder()} can't be written"
    return Built(module.family, spec.name, arch, seconds, cached, error)


def _require_compiler() -> None:
    try:
        compiler.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"compiling needs CuPy and NVRTC; pip install 'cuflash[compile]' has both ({error})"
        ) from error


def _targets(names: Sequence[str]) -> list[Device]:
    if not names:
        devices = cuda_devices()
        if not devices:
            raise ValueError(
                f"arch: none given, and no GPU is here ({unavailable_reason()}); expected such as "
                "'sm_90'"
            )
        return devices
    devices = [named(name) for name in names]
    for device in devices:
        if device.compute_capability is None:
            raise ValueError(f"arch: got {device.name!r}; expected such as 'sm_90'")
        compiler.loadable_architecture(device.compute_capability, exact=False)
    return devices


def _sequence(choice: _T | Sequence[_T] | None) -> Sequence[_T]:
    if choice is None:
        return ()
    return (choice,) if isinstance(choice, (str, int)) else choice
