"""`Specialisation`: one compiled module, as a source and the configuration it is compiled with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import source

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One compiled module. Hashable, so that it serves as the key of what was built from it.

    Parameters
    ----------
    source : str
        Path below the folder of CUDA sources.
    name : str
        A C identifier, the kernels' name in profilers, such as ``cuflash_fwd_sm80_d128_bf16``; the
        source sees it as ``CONFIG_NAME``.
    config : tuple of (key, value)
        Each becomes ``#define CONFIG_<KEY> <value>``: a bool as 0 or 1, text as it stands.
    exact_arch : bool
        Compile for the architecture alone (sm_90a) instead of it and its successors (sm_90).
    """

    source: str
    name: str
    config: tuple[tuple[str, int | bool | str], ...] = ()
    exact_arch: bool = False

    def __post_init__(self) -> None:
        if not _IDENTIFIER.fullmatch(self.name):
            raise ValueError(f"name: got {self.name!r}; expected a C identifier")
        keys = [key.upper() for key, _ in self.config]
        for key, (_, value) in zip(keys, self.config, strict=True):
            if not _IDENTIFIER.fullmatch(f"_{key}") or key == "NAME" or keys.count(key) > 1:
                raise ValueError(f"config: got key {key!r}; expected identifiers, each once")
            if isinstance(value, str) and "\n" in value:
                raise ValueError(f"config: {key} has more than one line: {value!r}")

    def text(self) -> str:
        """What the compiler gets: the defines, then the source with its headers in it."""
        values = [
            (key.upper(), int(value) if isinstance(value, bool) else value)
            for key, value in self.config
        ]
        lines = [f"#define CONFIG_{key} {value}\n" for key, value in (*values, ("NAME", self.name))]
        return "".join(lines) + source.expand(self.source)
