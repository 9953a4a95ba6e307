"""Cache folders that can't be written: the result is the same, and a warning says so."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_processes
import pytest
from compiling import FakeCompiler, add_kernel

from cuflash.runtime import cache

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("folder")


def no_space(path: Any, mode: str) -> Any:
    """As `open` on a full disk: the file appears, the write fails."""

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def write(self, content: bytes) -> None:
            Path(path).write_bytes(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    return Full()


def full_disk(folder: Path, patch: Patch) -> str:
    patch.setattr(cache, "open", no_space, raising=False)
    return "No space left"


def read_only(folder: Path, patch: Patch) -> str:
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    return "Permission denied"


def read_only_disk(folder: Path, patch: Patch) -> str:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    folder.mkdir()
    patch.setattr(cache, "open", refuse, raising=False)
    patch.setattr(os, "open", refuse)
    return "Read-only file system"


def uncreatable(folder: Path, patch: Patch) -> str:
    (folder.parent / "file").write_text("")
    patch.setenv("CUFLASH_CACHE_DIR", str(folder.parent / "file" / "cache"))
    return "Not a directory"


def no_home(folder: Path, patch: Patch) -> str:
    patch.delenv("CUFLASH_CACHE_DIR")
    patch.delenv("XDG_CACHE_HOME", raising=False)
    patch.setattr(os.path, "expanduser", lambda path: path)
    patch.chdir(folder.parent)
    return "there is no home directory"


@pytest.mark.parametrize(
    "obstacle",
    [full_disk, read_only, read_only_disk, uncreatable, no_home],
    ids=lambda f: f.__name__,
)
def test_without_a_folder_modules_last_for_the_process(
    obstacle: Callable[..., str],
    fake: FakeCompiler,
    folder: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = set(folder.parent.rglob("*"))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "cuflash"):
        reason = obstacle(folder, patch)
        entries = [cache.get(add_kernel(step), "sm_80") for step in (1, 2, 1)]
        kept_for_the_process = cache.peek(add_kernel(1), "sm_80")
    assert [entry.hit for entry in entries] == [False, False, True]
    assert len(fake.calls) == 2
    assert kept_for_the_process == entries[2]
    for entry, step in zip(entries, (1, 2, 1), strict=True):
        assert f"CONFIG_STEP {step}\n".encode() in entry.path.read_bytes()
        assert folder not in entry.path.parents
        assert entry.resources["cuflash_add"].registers == 8
    (warning,) = [record.getMessage() for record in caplog.records]
    assert reason in warning
    assert "CUFLASH_CACHE_DIR" in warning
    left = {path for path in folder.parent.rglob("*") if path.suffix not in (".lock", "")}
    assert left <= before, "half a file was left behind"


def test_a_folder_that_can_only_be_read_serves_what_it_has(
    fake: FakeCompiler, folder: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    first = cache.get(add_kernel(), "sm_80")
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("wrote"))
    monkeypatch.setattr(cache, "_one_process", lambda *_: pytest.fail("locked"))
    assert cache.get(add_kernel(), "sm_80").path == first.path
    assert not caplog.records


def test_the_folder_of_a_process_ends_with_it() -> None:
    script = (
        "import cuflash.runtime.cache as c; p = c._process.new_path('k'); "
        "p.write_bytes(b'x'); print(p)"
    )
    path = Path(cache_processes.run_python(script))
    assert path.parent.name.startswith("cuflash-")
    assert not path.parent.exists()
