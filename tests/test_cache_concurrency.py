"""Threads, processes and forks that meet in the cache compile once, and none gets stuck."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cache_processes
import pytest
from compiling import FakeCompiler, add_kernel

from cuflash.runtime import cache, compiler

Patch = pytest.MonkeyPatch
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
pytestmark = pytest.mark.usefixtures("folder")


def test_threads_that_meet_compile_once(fake: FakeCompiler, monkeypatch: Patch) -> None:
    barrier = threading.Barrier(16, timeout=60)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return fake.compile(*args, **options)

    def get(_: int) -> cache.Entry:
        barrier.wait()
        return cache.get(add_kernel(), "sm_80")

    monkeypatch.setattr(compiler, "compile_cubin", slow)
    with ThreadPoolExecutor(16) as pool:
        entries = list(pool.map(get, range(16)))
    assert len(fake.calls) == 1
    assert sorted(entry.hit for entry in entries) == [False] + 15 * [True]
    assert len({entry.path for entry in entries}) == 1


def test_threads_compile_once_where_nothing_can_be_locked(
    fake: FakeCompiler, folder: Path, monkeypatch: Patch
) -> None:
    (folder.parent / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(folder.parent / "file" / "cache"))
    test_threads_that_meet_compile_once(fake, monkeypatch)


def test_threads_compile_different_modules_at_once(fake: FakeCompiler, monkeypatch: Patch) -> None:
    barrier = threading.Barrier(2, timeout=60)

    def meet(*args: Any, **options: Any) -> Any:
        barrier.wait()  # breaks unless the other is compiling too
        return fake.compile(*args, **options)

    monkeypatch.setattr(compiler, "compile_cubin", meet)
    with ThreadPoolExecutor(2) as pool:
        entries = list(pool.map(lambda step: cache.get(add_kernel(step), "sm_80"), (1, 2)))
    assert entries[0].path != entries[1].path


def spawn(*args: Any) -> Any:
    return multiprocessing.get_context("spawn").Process(
        target=cache_processes.get_in, args=args, daemon=True
    )


def lines(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_processes_that_meet_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    start = time.time() + 2.0
    processes = [spawn(folder, log, 1.0, start) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(lines(log)) == 1
    cubin, hit = cache_processes.get_in(folder, log, 0.0)
    assert hit
    assert cubin.startswith(b"cubin of sm_80")


def test_a_process_that_dies_while_it_compiles_holds_up_nobody(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = spawn(folder, log, 300.0)
    process.start()
    wait_for(lambda: lines(log))
    process.kill()
    process.join(60)
    begin = time.monotonic()
    _, hit = cache_processes.get_in(folder, log, 0.0)
    assert time.monotonic() - begin < 10
    assert not hit
    assert len(lines(log)) == 2


def test_a_lock_that_never_opens_costs_double_work_only(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    log = tmp_path / "log"
    process = spawn(folder, log, 300.0)
    process.start()
    wait_for(lambda: lines(log))
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.3)
    cubin, hit = cache_processes.get_in(folder, log, 0.0)
    process.kill()
    process.join(60)
    assert (hit, len(lines(log))) == (False, 2)
    assert cubin.startswith(b"cubin of sm_80")
    assert cache_processes.get_in(folder, log, 0.0) == (cubin, True)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_compiles_is_not_stuck(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    thread = threading.Thread(target=cache_processes.get_in, args=(folder, log, 2.0))
    thread.start()
    wait_for(lambda: lines(log))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _, hit = cache_processes.get_in(folder, log, 0.0)
            status = 0 if hit else 2
        finally:
            os._exit(status)
    thread.join()
    wait_for(lambda: _ended(child))
    assert STATUS.pop(child) == 0
    assert len(lines(log)) == 1


STATUS: dict[int, int] = {}


def _ended(child: int) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        STATUS[child] = os.waitstatus_to_exitcode(status)
    return bool(pid)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_files() -> None:
    script = """
import os, cuflash.runtime.cache as c
path = c._process.new_path('k'); path.write_bytes(b'x')
child = os.fork()
if child == 0:
    assert c._process.folder is None, "the parent may end first"
    raise SystemExit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(path.exists())
"""
    assert cache_processes.run_python(script) == "True"
