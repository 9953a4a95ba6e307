"""The processes of the columns: each is started, asked with a time limit, and ended.

One that dies, hangs or can't start costs its own column.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

START_S, PREPARE_S, WINDOW_S = 120.0, 240.0, 60.0
_RESTARTS = 2  # of one column
_LONGEST = 240  # characters of a reason


@dataclass(frozen=True)
class Spec:
    """What a process runs: a module of `peers`, where its arrays lie, its options, and where else
    than here cuflash is taken from.
    """

    module: str
    place: str = "cuda"
    options: Mapping[str, Any] = field(default_factory=dict)
    tree: str = ""


class Failed(Exception):
    """A process did not do what it was asked. `gone` where it has ended since."""

    def __init__(self, reason: str, *, gone: bool = False, unsupported: bool = False) -> None:
        super().__init__(tidy(reason))
        self.gone, self.unsupported = gone, unsupported


class Process:
    """One worker. `ask` is `send` and `receive`; many can be sent to before one is waited for."""

    def __init__(self, spec: Spec) -> None:
        # Closed in `end`.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.worker"),
                *(spec.module, spec.place, json.dumps(dict(spec.options)), spec.tree),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=environment(),
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.versions: dict[str, str] = {}

    def greet(self, timeout: float) -> None:
        """Wait for its versions.

        Raises
        ------
        Failed
            With the reason why it can't work; it has ended then.
        """
        answer = self._answer(timeout)
        if "absent" in answer:
            self.end()
            raise Failed(answer["absent"], gone=True)
        self.versions = answer["versions"]

    def send(self, operation: str, **fields: Any) -> None:
        """Ask without waiting."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"op": operation, **fields}) + "\n")
            self._child.stdin.flush()
        except OSError:
            pass  # it has ended, which `receive` tells with what it said last

    def receive(self, timeout: float) -> Any:
        """The answer to what was sent.

        Raises
        ------
        Failed
            With the reason; a process that does not answer in time is ended.
        """
        answer = self._answer(timeout)
        if "error" not in answer:
            return answer["value"]
        gone = bool(answer.get("fatal"))
        if gone:
            self.end()
        unsupported = bool(answer.get("unsupported"))
        raise Failed(answer["error"], gone=gone, unsupported=unsupported)

    def ask(self, operation: str, timeout: float, **fields: Any) -> Any:
        """Send, and wait for the answer."""
        self.send(operation, **fields)
        return self.receive(timeout)

    def leave(self) -> None:
        """Tell it that there is no more to do."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()

    def end(self) -> None:
        """Let it end, or make it."""
        assert self._child.stdout is not None
        self.leave()
        try:
            self._child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(timeout=5.0)
        self._child.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            for line in self._child.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._child.kill()
            self.end()
            raise Failed(f"no answer within {timeout:g} s", gone=True) from None
        if not line:
            said = self._last_words()
            status = self._child.wait()
            self.end()
            raise Failed(f"ended with status {status}{said}", gone=True)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f": {lines[-1]}" if lines else ""


class Team:
    """The processes of some columns, started together, and again where they ended too soon."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)
        self.absent: dict[str, str] = {}
        self._running: dict[str, Process] = {}
        self._starts = dict.fromkeys(specs, 0)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(list(self._running))

    def present(self, names: Iterable[str]) -> dict[str, Process]:
        """Those of these columns that can work, started where they are not."""
        wanted = [name for name in names if name not in self.absent]
        new = {name: self._start(name) for name in wanted if name not in self._running}
        for name, process in new.items():
            try:
                process.greet(START_S)
                self._running[name] = process
            except Failed as failure:
                self.absent[name] = str(failure)
        return {name: self._running[name] for name in wanted if name in self._running}

    def lost(self, name: str, reason: str) -> None:
        """A process has gone: another will take its place, unless too many have."""
        self._running.pop(name, None)
        if self._starts[name] > _RESTARTS:
            self.absent[name] = f"ended {self._starts[name]} times, at last: {reason}"

    def versions(self) -> dict[str, str]:
        """Of all that runs; those of another source tree are told by its name alone."""
        found: dict[str, str] = {}
        for name, process in self._running.items():
            if not self.specs[name].tree:
                found |= process.versions
        return dict(sorted(found.items()))

    def end(self, names: Iterable[str]) -> None:
        """End these, all at a time."""
        ended = [self._running.pop(name) for name in names if name in self._running]
        for process in ended:
            process.leave()
        for process in ended:
            process.end()

    def _start(self, name: str) -> Process:
        self._starts[name] += 1
        return Process(self.specs[name])


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds the modules that this one does."""
    paths = dict.fromkeys([os.getcwd(), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def tidy(reason: str) -> str:
    """The first line that says something, without the folders of this machine."""
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "no reason given")
    line = re.sub(r"(?<![\w./])/(?!/)(?:[\w.+@~-]+/)+", "", line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
