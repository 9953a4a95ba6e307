"""Compiled modules on their devices, each loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import cache, compiler
from .cache import Entry
from .device import Device, activate
from .locks import KeyedLocks, after_fork
from .ptxas import Resources
from .specialisation import Specialisation


class LoadedModule:
    """The kernels of one specialisation on one device."""

    def __init__(self, entry: Entry, device: Device, module: Any) -> None:
        self.entry, self.device = entry, device
        self._module = module
        self._functions: dict[str, Any] = {}

    @property
    def resources(self) -> dict[str, Resources]:
        """What each kernel takes, by its name."""
        return self.entry.resources

    def function(self, name: str) -> Any:
        """A kernel, as a `cupy.RawKernel`; launch it with the module's device current."""
        found = self._functions.get(name)
        if found is None:
            with activate(self.device):
                # Threads that meet here get the same kernel, so that its attributes are set once.
                found = self._functions.setdefault(name, self._module.get_function(name))
        return found


_threads = KeyedLocks()
_loaded: dict[tuple[int, Specialisation], LoadedModule] = {}
after_fork(_loaded.clear)


def load(spec: Specialisation, device: Device) -> LoadedModule:
    """The module on a GPU of this machine, compiled and loaded on first use.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    key = (device.index, spec)
    found = _loaded.get(key)
    if found is not None:
        return found
    with _threads.of(key):
        if key not in _loaded:
            _loaded[key] = _load(spec, device)
        return _loaded[key]


def _load(spec: Specialisation, device: Device) -> LoadedModule:
    arch = _architecture(spec, device)
    entry = cache.get(spec, arch)
    with activate(device):
        try:
            module = _read(entry.path)
        except RuntimeError:  # the driver's message for a missing file is as any other
            if entry.path.exists():
                raise
            entry = cache.get(spec, arch)  # another process has cleared the cache meanwhile
            module = _read(entry.path)
    return LoadedModule(entry, device, module)


def _read(path: Path) -> Any:
    import cupy

    module = cupy.RawModule(path=str(path))
    module.compile()  # reads the file now; a cubin is not compiled again
    return module


def resources(spec: Specialisation, device: Device) -> dict[str, Resources] | None:
    """What each kernel takes on a device that need not be here; None before it was compiled."""
    if device.compute_capability is None:
        return None
    try:
        entry = cache.peek(spec, _architecture(spec, device))
    except (ImportError, RuntimeError):  # no CuPy, or no NVRTC
        return None
    return None if entry is None else entry.resources


def _architecture(spec: Specialisation, device: Device) -> str:
    if device.compute_capability is None:
        raise ValueError(f"{spec.name}: needs a GPU, not {device}")
    return compiler.loadable_architecture(device.compute_capability, spec.exact_arch)
