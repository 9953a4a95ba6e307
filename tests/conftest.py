"""GPU tests are skipped where there is none; where there is one, their outcome can be recorded."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from compiling import ADD, ADD_HEADER, FakeCompiler, write_sources

import cuflash
from cuflash import kinds, operands
from cuflash.runtime import cache, device, source


@pytest.fixture(autouse=True)
def no_earlier_calls() -> None:
    """What other tests called is as if it had not been, else it would go by what they patched."""
    kinds.forget()


@pytest.fixture(scope="module")
def cupy() -> Iterator[ModuleType]:
    """CuPy where it has a device; what the tests leave in its memory pool is given back."""
    module: Any = pytest.importorskip("cupy")
    if not module.is_available():
        pytest.skip("no CUDA device")
    yield module
    module.get_default_memory_pool().free_all_blocks()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record",
        type=Path,
        metavar="FILE",
        help="write the outcome of the GPU tests and the hash of each CUDA source to FILE",
    )
    parser.addoption(
        "--all-kernels",
        action="store_true",
        help="compile every kernel for every architecture, which takes minutes",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = device.unavailable_reason()
    if not reason:
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reason = device.unavailable_reason()
    if reason:
        terminalreporter.write_line(f"GPU tests were skipped: {reason.splitlines()[0]}")
    path = config.getoption("--gpu-record")
    if path is None:
        return
    counts = {
        outcome: sum(
            "gpu" in getattr(report, "keywords", ())
            for report in terminalreporter.stats.get(outcome, [])
        )
        for outcome in ("passed", "failed", "error", "skipped")
    }
    path.write_text(json.dumps(gpu_record(counts), indent=2) + "\n")
    terminalreporter.write_line(f"GPU record: {path}: {counts}")


def gpu_record(counts: dict[str, int]) -> dict[str, Any]:
    """What ran where: device, versions, counts, and the CUDA sources it was about."""
    import cupy

    gpu = device.cuda_device(cupy.cuda.Device().id)
    return {
        "device": str(gpu),
        "cuda": cuflash.info().cuda,
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cuflash": cuflash.__version__,
        "counts": counts,
        "cuda_src": source.hashes(),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, as a fresh process sees it."""
    place = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(place))
    monkeypatch.setattr(cache, "_process", cache._Process())
    monkeypatch.setattr(cache, "_warned", set())
    return place


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """A fake compiler, and the sources of `ADD`."""
    write_sources(tmp_path / "sources", monkeypatch, add_cu=ADD, add_cuh=ADD_HEADER)
    return FakeCompiler(monkeypatch)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each call that was checked whole."""
    seen: list[Any] = []
    build_spec = operands.build_spec

    def counted(q: Any, k: Any, v: Any, options: Any) -> Any:
        seen.append(options)
        return build_spec(q, k, v, options)

    monkeypatch.setattr(operands, "build_spec", counted)
    return seen


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
