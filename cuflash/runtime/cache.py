"""Compiled modules on disk, shared by processes; each is compiled once.

An entry is ``<key>.cubin`` and ``<key>.json``, the key a hash of all that decides the result. Files
appear whole, by renaming; the JSON holds a checksum of the cubin, so that anything else than the
pair that was written counts as missing and is built again.

A folder that can't be written costs a warning, not the result: modules then last for the process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import compiler
from .locks import KeyedLocks, after_fork
from .ptxas import Resources
from .specialisation import Specialisation

FORMAT = 1  # of the files; another number makes all older entries unknown
VARIABLE = "CUFLASH_CACHE_DIR"

_log = logging.getLogger("cuflash")

# A lock dies with its process. Past this, on a file system where that fails, compile without it:
# double work, and the same result.
_LOCK_TIMEOUT_S = 120.0
_OWN_FILE = re.compile(r"[0-9a-f]{64}\.(?:cubin|json|lock)|\.[0-9a-f]{64}\.[0-9a-f]+\.tmp")


@dataclass(frozen=True, slots=True)
class Entry:
    """A cubin file, each kernel's resources by name, and what compiling took.

    `hit` tells that it had been compiled before, by this process or another.
    """

    path: Path
    resources: dict[str, Resources]
    seconds: float
    hit: bool


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the cache folder holds: modules, their bytes, and how many for each architecture."""

    folder: Path
    entries: int
    bytes: int
    architectures: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON types."""
        return {**dataclasses.asdict(self), "folder": str(self.folder)}


class _Process:
    """What this process keeps for itself: entries that the folder could not take."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.folder: Path | None = None

    def new_path(self, key: str) -> Path:
        if self.folder is None:
            self.folder = _temporary_folder()
            atexit.register(_remove_in, os.getpid(), self.folder)
        return self.folder / f"{key}.cubin"


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="cuflash-"))
    except OSError:
        if not os.path.isdir("/dev/shm"):  # memory, where every disk is full or read-only
            raise
        return Path(tempfile.mkdtemp(prefix="cuflash-", dir="/dev/shm"))


def _remove_in(process: int, folder: Path) -> None:
    if os.getpid() == process:  # a forked child inherits the call, not the folder
        shutil.rmtree(folder, ignore_errors=True)


_threads = KeyedLocks()
_process = _Process()
_warned: set[Path] = set()


def _forget() -> None:
    """In a forked child: its parent may end and remove what it kept."""
    global _process
    _process = _Process()


after_fork(_forget)


def folder() -> Path:
    """Where entries are kept; it need not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "cuflash"


def get(spec: Specialisation, arch: str, *, show_progress: bool = True) -> Entry:
    """The compiled module; compiles it where no thread or process has done so before.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    text = spec.text()
    key = _key(text, arch)
    found = _find(key)
    if found is not None:
        return found
    place = folder()
    with _threads.of(key), _one_process(place, key):
        found = _find(key)
        if found is not None:
            return found
        compiled = compiler.compile_cubin(text, arch, spec.name, show_progress=show_progress)
        return _keep(place, key, compiled, {"name": spec.name, "arch": arch})


def peek(spec: Specialisation, arch: str) -> Entry | None:
    """The compiled module if it exists already."""
    return _find(_key(spec.text(), arch))


def info() -> CacheInfo:
    """Size and content of the folder."""
    place = folder()
    architectures: Counter[str] = Counter()
    size = 0
    for path in _own_files(place):
        with contextlib.suppress(OSError):  # another process may clear at the same time
            size += path.stat().st_size
            if path.suffix == ".json":
                architectures[_arch_of(path)] += 1
    return CacheInfo(place, sum(architectures.values()), size, dict(sorted(architectures.items())))


def clear() -> int:
    """Remove every entry from the folder, and nothing else; returns how many there were.

    Modules that a process has loaded stay loaded.
    """
    place, count = folder(), 0
    for path in _own_files(place):
        path.unlink(missing_ok=True)
        count += path.suffix == ".json"
    return count


def _key(text: str, arch: str) -> str:
    parts = (FORMAT, compiler.nvrtc_version(), compiler.OPTIONS, arch, text)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _find(key: str) -> Entry | None:
    return _process.entries.get(key) or _read(folder(), key)


def _read(place: Path, key: str) -> Entry | None:
    """The entry of a key, or None where one of its files is missing or not as it was written."""
    path = place / f"{key}.cubin"
    try:
        record = json.loads((place / f"{key}.json").read_bytes())
        cubin = path.read_bytes()
        if (record["size"], record["sha256"]) != (len(cubin), hashlib.sha256(cubin).hexdigest()):
            raise ValueError("the checksum is another")
        resources = {
            name: Resources(**{**fields, "warnings": tuple(fields["warnings"])})
            for name, fields in record["resources"].items()
        }
        return Entry(path, resources, float(record["seconds"]), hit=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("cache entry %s is damaged (%r)", path, error)
        return None


def _keep(place: Path, key: str, compiled: compiler.Compiled, about: dict[str, str]) -> Entry:
    """Publish an entry, or keep it for this process where the folder does not take it."""
    entry = Entry(place / f"{key}.cubin", compiled.resources, compiled.seconds, hit=False)
    record = {
        **about,
        "nvrtc": compiler.version_text(),
        "seconds": round(compiled.seconds, 3),
        "size": len(compiled.cubin),
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "resources": {
            name: dataclasses.asdict(found) for name, found in compiled.resources.items()
        },
        "log": compiled.log,
    }
    try:
        if not place.is_absolute():
            raise OSError("there is no home directory")
        _publish(place, f"{key}.cubin", compiled.cubin)
        _publish(place, f"{key}.json", json.dumps(record, indent=1).encode())
    except OSError as error:
        _warn_once(place, error)
        path = _process.new_path(key)
        path.write_bytes(compiled.cubin)
        entry = dataclasses.replace(entry, path=path)
        _process.entries[key] = dataclasses.replace(entry, hit=True)
    return entry


def _publish(place: Path, name: str, content: bytes) -> None:
    """Make a file appear whole: written beside its place, then renamed."""
    temporary = place / f".{name.partition('.')[0]}.{secrets.token_hex(8)}.tmp"
    try:
        # With the permissions of any new file, unlike `tempfile`: users may share the folder.
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, place / name)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _one_process(place: Path, key: str) -> Iterator[None]:
    """Keep other processes from compiling the same; go on without that where it can't be had."""
    from filelock import FileLock

    with contextlib.ExitStack() as held:
        try:
            if not place.is_absolute():
                raise OSError("there is no home directory")
            place.mkdir(parents=True, exist_ok=True)
            lock = FileLock(place / f"{key}.lock", timeout=_LOCK_TIMEOUT_S)
            held.enter_context(lock)
        except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
            _log.debug("no lock for %s: %s", key, error)
        yield


def _warn_once(place: Path, error: OSError) -> None:
    if place not in _warned:
        _warned.add(place)
        _log.warning(
            "the cache folder %s can't be written (%s): compiled kernels last for this process; "
            "%s chooses another folder",
            place,
            error.strerror or error,
            VARIABLE,
        )


def _own_files(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if _OWN_FILE.fullmatch(path.name))
    except OSError:
        return []


def _arch_of(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["arch"])
    except (ValueError, KeyError, TypeError):
        return "damaged"
