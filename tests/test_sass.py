"""The machine code of the kernels has the instructions that their speed rests on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from compiling import disassemble, needs_compiler

from cuflash import ArrayInfo, explain
from cuflash.runtime import cache, device

pytestmark = needs_compiler
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", re.MULTILINE)


def opcodes(kernel: str, arch: str, folder: Path, *, dim: int, causal: bool) -> Counter[str]:
    """How often each instruction stands in the kernel of a call."""
    array = ArrayInfo((1, 8, 4096, dim))
    plan = explain(array, array, array, causal=causal, device=device.named(arch), kernel=kernel)
    assert plan.tiling.launch is not None
    entry = cache.get(plan.tiling.launch.module, arch, show_progress=False)
    return Counter(OPCODE.findall(disassemble(entry.path.read_bytes(), folder)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_sm80_multiplies_on_tensor_cores_and_loads_asynchronously(
    arch: str, dim: int, causal: bool, tmp_path: Path
) -> None:
    found = opcodes("sm80", arch, tmp_path, dim=dim, causal=causal)
    assert found["HMMA.16816.F32"] >= 64
    for name in ("LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128", "MUFU.EX2"):
        assert found[name], f"{name} is not among {sorted(found)}"
    local = [name for name in found if name.startswith(("STL", "LDL"))]
    assert not local, "registers go to memory"
