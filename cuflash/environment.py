"""`info()`: versions, devices and families, for a bug report or a doubt."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import families
from .dispatch import PREFERENCE
from .plan import format_bytes
from .runtime import cache, source
from .runtime.device import CPU, Device, cuda_devices, unavailable_reason
from .version import __version__

VARIABLES = {
    "CUFLASH_LOG": "1 logs each call's plan, once for each problem",
    cache.VARIABLE: "folder of compiled kernels; default: ~/.cache/cuflash",
}


@dataclass(frozen=True, slots=True)
class Info:
    """What cuflash finds on this machine. `print(info)` shows it; `to_dict()` is JSON-ready."""

    cuflash: str
    python: str
    numpy: str
    blas: str
    cupy: str
    cuda: str
    gpu_missing: str
    devices: tuple[Device, ...]
    families: tuple[str, ...]
    cuda_source: str
    cache_folder: str
    cache_modules: int
    cache_bytes: int
    variables: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"cuflash      {self.cuflash}",
            f"Python       {self.python}",
            f"NumPy        {self.numpy}, BLAS {self.blas}",
            f"CuPy         {self.cupy}",
            f"CUDA         {self.cuda}",
            *(f"device       {device}" for device in self.devices),
        ]
        if self.gpu_missing:
            lines.append(f"no GPU       {self.gpu_missing}; NumPy arrays run on the CPU")
        lines += [
            f"families     {', '.join(self.families)}",
            f"CUDA source  {self.cuda_source}",
            f"cache        {self.cache_folder}, {self.cache_modules} compiled modules, "
            f"{format_bytes(self.cache_bytes)}",
            *(f"{name}={value}" for name, value in self.variables.items()),
        ]
        return "\n".join(lines)


def info() -> Info:
    """Versions, devices and kernel families of this machine; imports CuPy where it is installed."""
    missing = unavailable_reason()
    cached = cache.info()
    gpus = cuda_devices()
    return Info(
        cuflash=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        blas=_blas_name(),
        cupy=_cupy_version(),
        cuda="none" if missing else _cuda_versions(),
        gpu_missing=missing,
        devices=(CPU, *gpus),
        families=tuple(n for n in PREFERENCE if n in (*families.BUILT, *families.IN_8_BITS)),
        cuda_source=str(source.root()),
        cache_folder=str(cached.folder),
        cache_modules=cached.entries,
        cache_bytes=cached.bytes,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _blas_name() -> str:
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _cupy_version() -> str:
    try:
        import cupy
    except ImportError as error:
        return f"not available ({error})"
    return str(cupy.__version__)


def _cuda_versions() -> str:
    from cupy.cuda import runtime
    from cupy_backends.cuda.libs import nvrtc

    driver, loaded = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    compiler = ".".join(map(str, nvrtc.getVersion()))
    return f"driver API {_dotted(driver)}, runtime {_dotted(loaded)}, NVRTC {compiler}"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
