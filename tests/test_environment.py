"""`info()` says what is on this machine, and what is missing and why."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import dispatch, families
from cuflash.runtime import device, source


def test_info_names_versions_devices_and_families() -> None:
    found = cuflash.info()
    assert found.cuflash == cuflash.__version__
    assert found.python == platform.python_version()
    assert found.numpy == np.__version__
    assert found.blas
    cpu, *gpus = found.devices
    assert cpu == device.CPU
    assert bool(gpus) != bool(found.gpu_missing)
    assert all(gpu.compute_capability and gpu.sm_count and gpu.memory for gpu in gpus)
    assert set(found.families) == {*families.BUILT, *families.IN_8_BITS}
    assert list(found.families) == [f for f in dispatch.PREFERENCE if f in found.families]
    assert (Path(found.cuda_source) / "standard" / "softmax.cu").is_file()


def test_info_is_json() -> None:
    found = cuflash.info()
    read = json.loads(json.dumps(found.to_dict()))
    assert read["numpy"] == np.__version__
    assert read["devices"][0]["name"] == "CPU"
    assert read["families"] == list(found.families)


def test_printed_info_has_every_figure() -> None:
    found = cuflash.info()
    text = str(found)
    figures = (found.cuflash, found.python, found.numpy, found.blas, found.cupy, found.cuda)
    for part in (*figures, found.cuda_source, *found.families, *map(str, found.devices)):
        assert part in text
    assert found.gpu_missing in text


def test_info_lists_our_variables_where_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFLASH_LOG", "CUFLASH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert cuflash.info().variables == {}
    monkeypatch.setenv("CUFLASH_LOG", "1")
    assert cuflash.info().variables == {"CUFLASH_LOG": "1"}
    assert "CUFLASH_LOG=1" in str(cuflash.info())


def test_info_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = cuflash.info()
    assert found.devices == (device.CPU,)
    assert "CuPy can't be imported" in found.gpu_missing
    assert found.cupy.startswith("not available (")
    assert found.cuda == "none"
    assert "NumPy arrays run on the CPU" in str(found)


def test_the_cuda_sources_are_found_or_both_places_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "softmax_rows" in source.read("standard/softmax.cu")
    monkeypatch.setattr(source, "_PACKAGE", Path("/nowhere/cuflash"))
    source.root.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match=r"/nowhere/cuflash/_cuda_src nor /nowhere/cu"):
            source.root()
    finally:
        source.root.cache_clear()
