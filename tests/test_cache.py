"""The disk cache of compiled modules: what it keys on, and that damage does not make it wrong."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compiling import FakeCompiler, add_kernel, needs_compiler, write_sources

from cuflash.families import standard
from cuflash.runtime import cache, compiler, device
from cuflash.runtime.ptxas import Resources

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("folder")


def only(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"*{suffix}")
    return path


# --- what is kept, and under which key -----------------------------------------------------------


def test_a_module_is_compiled_once(fake: FakeCompiler, folder: Path) -> None:
    assert cache.peek(add_kernel(), "sm_80") is None
    assert not folder.exists(), "looking makes nothing"
    first = cache.get(add_kernel(), "sm_80")
    again = cache.get(add_kernel(), "sm_80")
    seen = cache.peek(add_kernel(), "sm_80")
    assert len(fake.calls) == 1
    assert (first.hit, again.hit) == (False, True)
    assert again == seen
    assert again.path == first.path == only(folder, ".cubin")
    assert again.path.read_bytes().startswith(b"cubin of sm_80: #define CONFIG_STEP 1\n")
    assert first.resources == {"cuflash_add": Resources(registers=8, warnings=("careful",))}
    assert again.resources == first.resources
    assert again.seconds == 0.5
    record = json.loads(only(folder, ".json").read_text())
    assert (record["name"], record["arch"], record["log"]) == ("cuflash_add", "sm_80", "a log")


def edit_header(fake: FakeCompiler, patch: Patch) -> None:
    header = cache.compiler.source.root() / "add.cuh"
    header.write_text(header.read_text() + "// edited\n")


def change_options(fake: FakeCompiler, patch: Patch) -> None:
    patch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))


def change_version(fake: FakeCompiler, patch: Patch) -> None:
    fake.version = (13, 1)


def change_format(fake: FakeCompiler, patch: Patch) -> None:
    patch.setattr(cache, "FORMAT", cache.FORMAT + 1)


@pytest.mark.parametrize(
    "change", [edit_header, change_options, change_version, change_format], ids=lambda f: f.__name__
)
def test_whatever_decides_the_result_is_in_the_key(
    change: Callable[..., None], fake: FakeCompiler, monkeypatch: Patch
) -> None:
    before = cache.get(add_kernel(), "sm_80").path
    change(fake, monkeypatch)
    assert cache.peek(add_kernel(), "sm_80") is None
    after = cache.get(add_kernel(), "sm_80")
    assert not after.hit
    assert after.path != before
    assert len(fake.calls) == 2


def test_configuration_and_architecture_are_in_the_key(fake: FakeCompiler) -> None:
    paths = {
        cache.get(add_kernel(step), arch).path
        for step in (1, 2)
        for arch in ("sm_90", "sm_90a", "sm_80")
    }
    assert len(paths) == len(fake.calls) == 6
    assert cache.info().architectures == {"sm_80": 2, "sm_90": 2, "sm_90a": 2}


def test_files_have_the_permissions_of_any_new_file(fake: FakeCompiler, folder: Path) -> None:
    """Several users may share a folder."""
    entry = cache.get(add_kernel(), "sm_80")
    plain = folder / "plain"
    plain.touch()
    assert stat.S_IMODE(entry.path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_the_folder(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/kernels")
    assert cache.folder() == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "here")
    assert cache.folder() == tmp_path / "here"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "")
    assert cache.folder() == Path("/var/xdg/cuflash")
    for unusable in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache.folder() == tmp_path / ".cache" / "cuflash"


@needs_compiler
def test_a_warm_get_is_quick() -> None:
    spec = standard.specialisations(device.named("9.0"), [64], ["float16"])[0]
    assert not cache.get(spec, "sm_90").hit
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert cache.get(spec, "sm_90").hit
        times.append(time.perf_counter() - begin)
    assert sorted(times)[2] < 0.05, times


@needs_compiler
def test_a_module_that_does_not_compile_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: Patch
) -> None:
    write_sources(tmp_path / "sources", monkeypatch, add_cu="broken")
    for _ in range(2):
        with pytest.raises(compiler.CompileError, match=r"add.cu\(1\)"):
            cache.get(add_kernel(), "sm_80")
    assert cache.info().entries == 0
    assert not list(folder.glob("*.cubin"))


# --- damage --------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\x00garbage" * 3)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_json(path: Path) -> None:
    path.write_text("[1, 2]")


def lacking_json(path: Path) -> None:
    record = json.loads(path.read_text())
    del record["resources"]
    path.write_text(json.dumps(record))


def strange_json(path: Path) -> None:
    record = json.loads(path.read_text())
    record["resources"] = {"f": {"registers": 3, "colour": "blue", "warnings": []}}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        *((".cubin", damage) for damage in (truncate, empty, garble, flip_a_bit, os.unlink)),
        *((".json", damage) for damage in (truncate, empty, garble, os.unlink)),
        *((".json", damage) for damage in (other_json, lacking_json, strange_json)),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_damaged_entry_is_built_again(
    suffix: str, damage: Callable[[Path], None], fake: FakeCompiler, folder: Path
) -> None:
    right = cache.get(add_kernel(), "sm_80").path.read_bytes()
    damage(only(folder, suffix))
    assert cache.peek(add_kernel(), "sm_80") is None
    again = cache.get(add_kernel(), "sm_80")
    assert (again.hit, len(fake.calls)) == (False, 2)
    assert again.path.read_bytes() == right
    assert cache.get(add_kernel(), "sm_80").hit


# --- info and clear ------------------------------------------------------------------------------


def test_clear_removes_its_own_files_alone(fake: FakeCompiler, folder: Path) -> None:
    for step in (1, 2, 3):
        cache.get(add_kernel(step), "sm_80")
    only_key = next(folder.glob("*.json")).stem
    (folder / f".{only_key}.0123abcd.tmp").write_bytes(b"of a process that died")
    (folder / f"{'0' * 64}.cubin").write_bytes(b"of another version")
    foreign = [
        folder / "notes.txt",
        folder / "my.cubin",
        folder / f"{only_key}.cubin.bak",
        folder / f"{only_key[:-1]}.json",
        folder / "kept" / f"{only_key}.json",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert cache.clear() == 3
    left = sorted(path for path in folder.rglob("*") if path.is_file())
    assert left == sorted(foreign)
    assert cache.info().entries == cache.info().bytes == 0
    assert cache.clear() == 0
    assert not cache.get(add_kernel(1), "sm_80").hit


def test_info_counts(fake: FakeCompiler, folder: Path) -> None:
    assert cache.info() == cache.CacheInfo(folder, 0, 0, {})
    cache.get(add_kernel(), "sm_80")
    cache.get(add_kernel(), "sm_90a")
    only_json = sorted(folder.glob("*.json"))
    found = cache.info()
    assert (found.entries, found.architectures) == (2, {"sm_80": 1, "sm_90a": 1})
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert found.bytes == sum(sizes) > 0
    only_json[0].write_text("")
    assert cache.info().entries == 2
    assert cache.info().architectures["damaged"] == 1
    assert json.loads(json.dumps(found.to_dict()))["folder"] == str(folder)
