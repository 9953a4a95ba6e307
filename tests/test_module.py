"""Modules on their devices: loaded once, with the resources that the cache knows of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from compiling import ADD, ADD_HEADER, FakeCompiler, add_kernel, missing_compiler, write_sources

from cuflash.runtime import cache, compiler, device, module
from cuflash.runtime.device import Device

H200 = Device("cuda", "H200", 0, (9, 0))
SECOND = Device("cuda", "H200", 1, (9, 0))
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    write_sources(tmp_path / "sources", monkeypatch, add_cu=ADD, add_cuh=ADD_HEADER)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    before = dict(module._loaded)
    module._loaded.clear()
    yield
    module._loaded.clear()
    module._loaded.update(before)


@pytest.fixture
def fake(monkeypatch: Patch) -> FakeCompiler:
    """No compiler and no device: loading notes the file."""
    fake = FakeCompiler(monkeypatch)
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (80, 90))
    monkeypatch.setattr(module, "activate", lambda device: nullcontext())
    return fake


def test_each_device_loads_a_module_once(fake: FakeCompiler, monkeypatch: Patch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(module, "_read", lambda path: read.append(path) or object())
    first, again, second = (module.load(add_kernel(), d) for d in (H200, H200, SECOND))
    other = module.load(add_kernel(2), H200)
    assert first is again
    assert len({id(loaded) for loaded in (first, second, other)}) == 3
    assert (len(read), len(fake.calls)) == (3, 2)
    assert {arch for _, arch, _ in fake.calls} == {"sm_90"}
    assert first.resources["cuflash_add"].registers == 8


def test_threads_that_meet_load_once(fake: FakeCompiler, monkeypatch: Patch) -> None:
    barrier = threading.Barrier(16, timeout=60)
    read: list[Path] = []

    def load(_: int) -> module.LoadedModule:
        barrier.wait()
        return module.load(add_kernel(), H200)

    monkeypatch.setattr(module, "_read", lambda path: read.append(path) or object())
    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(load, range(16)))
    assert len(set(map(id, loaded))) == len(read) == 1


def test_functions_are_made_once(fake: FakeCompiler, monkeypatch: Patch) -> None:
    class Raw:
        def get_function(self, name: str) -> list[str]:
            return [name]

    monkeypatch.setattr(module, "_read", lambda path: Raw())
    loaded = module.load(add_kernel(), H200)
    assert loaded.function("f") == ["f"]
    assert loaded.function("f") is loaded.function("f")
    assert loaded.function("g") == ["g"]


def test_a_cache_that_is_cleared_meanwhile_is_filled_again(
    fake: FakeCompiler, monkeypatch: Patch
) -> None:
    def read(path: Path) -> str:
        if len(fake.calls) == 1:
            cache.clear()
            raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND")
        return path.read_text()

    monkeypatch.setattr(module, "_read", read)
    assert module.load(add_kernel(), H200)._module.startswith("cubin of sm_90")
    assert len(fake.calls) == 2


def test_a_cubin_that_the_driver_refuses_is_an_error(
    fake: FakeCompiler, monkeypatch: Patch
) -> None:
    def read(path: Path) -> str:
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(module, "_read", read)
    with pytest.raises(RuntimeError, match="NO_BINARY"):
        module.load(add_kernel(), H200)
    assert not module._loaded


def test_resources_are_looked_up_without_compiling(fake: FakeCompiler) -> None:
    sm90 = device.named("9.0")
    assert module.resources(add_kernel(), sm90) is None
    assert fake.calls == []
    cache.get(add_kernel(), "sm_90")
    found = module.resources(add_kernel(), sm90)
    assert found is not None
    assert found["cuflash_add"].registers == 8
    assert module.resources(add_kernel(), device.named("8.6")) is None  # another file
    assert module.resources(add_kernel(), device.named("12.0")) is None  # not for this compiler
    assert module.resources(add_kernel(), device.CPU) is None
    with pytest.raises(ValueError, match="cuflash_add: needs a GPU, not CPU"):
        module.load(add_kernel(), device.CPU)


def test_no_compiler_means_no_resources(monkeypatch: Patch) -> None:
    def missing() -> Any:
        raise ImportError("no CuPy")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    compiler.nvrtc_version.cache_clear()
    compiler.supported_architectures.cache_clear()
    assert module.resources(add_kernel(), H200) is None
    assert missing_compiler()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_with_nothing_loaded(fake: FakeCompiler, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "_read", lambda path: object())
    module.load(add_kernel(), H200)
    held = module._threads.of((H200.index, add_kernel()))
    with held:
        child = os.fork()
        if child == 0:
            # The lock would be held for ever here, if it were the parent's.
            free = module._threads.of((H200.index, add_kernel())).acquire(timeout=5)
            os._exit(0 if free and not module._loaded else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert module._loaded


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
def test_a_module_runs_and_is_loaded_from_memory_again(exact: bool, monkeypatch: Patch) -> None:
    import cupy

    spec = add_kernel(3)
    if exact:
        if device.cuda_device(0).compute_capability < (9, 0):
            pytest.skip("targets for one architecture alone begin at 9.0")
        spec = module.Specialisation(spec.source, spec.name, spec.config, exact_arch=True)
    loaded = module.load(spec, device.cuda_device(0))
    x = cupy.zeros(32, cupy.float32)
    loaded.function("cuflash_add")((1,), (32,), (x,))
    assert x.get().tolist() == [3.0] * 32
    assert loaded.resources["cuflash_add"].registers == loaded.function("cuflash_add").num_regs

    monkeypatch.setattr(cache, "get", lambda *_: pytest.fail("looked on the disk"))
    assert module.load(spec, device.cuda_device(0)) is loaded
    loaded.function("cuflash_add")((1,), (32,), (x,))
    assert x.get().tolist() == [6.0] * 32


@pytest.mark.gpu
def test_a_module_runs_without_a_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    import cupy

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_process", cache._Process())
    x = cupy.zeros(32, cupy.float32)
    module.load(add_kernel(5), device.cuda_device(0)).function("cuflash_add")((1,), (32,), (x,))
    assert x.get().tolist() == [5.0] * 32


@pytest.mark.gpu
def test_each_of_two_devices_runs_its_own(monkeypatch: Patch) -> None:
    import cupy

    if len(device.cuda_devices()) < 2:
        pytest.skip("needs two GPUs")
    for index in (1, 0):
        loaded = module.load(add_kernel(), device.cuda_device(index))
        with cupy.cuda.Device(index):
            x = cupy.zeros(32, cupy.float32)
            loaded.function("cuflash_add")((1,), (32,), (x,))
            assert x.get().tolist() == [1.0] * 32


@pytest.mark.gpu
def test_a_kernel_that_is_not_there_is_an_error() -> None:
    import cupy

    loaded = module.load(add_kernel(), device.cuda_device(0))
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="NOT_FOUND"):
        loaded.function("cuflash_subtract")
