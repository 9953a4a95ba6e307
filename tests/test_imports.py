"""The import graph: downward only, CuPy only where GPU work begins, and quick."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cuflash

ROOT = Path(cuflash.__file__).parent

# Lowest first: a module imports from lower layers alone, so that no cycle is possible. Names are
# relative to the package, which itself is "".
LAYERS = (
    (
        "version",
        "dlpack",
        "spec",
        "oracle",
        "runtime",
        "fp8.formats",
        "fp8.accumulate",
        "fp8.sample",
    ),
    ("arrays", "runtime.device", "runtime.source", "runtime.cublas", "runtime.locks"),
    ("runtime.ptxas", "runtime.progress", "runtime.specialisation", "validate"),
    ("runtime.compiler", "validate_backward"),
    ("runtime.cache",),
    ("runtime.graphs", "runtime.module", "runtime.launch", "runtime.tensormap", "runtime.tickets"),
    ("operands", "traffic", "merge", "fp8.recipe"),
    ("plan", "kinds", "reference_rows", "fp8.rotation", "fp8.scales", "fp8.inputs"),
    ("reference", "reference_backward", "fp8.tensors"),
    ("families", "families.fused", "families.backward.sm80_tiles", "families.backward.turns"),
    ("families.sm90_tiles", "families.backward.sm90_tiles"),
    ("fp8.emulate", "fp8.gpu_quantizer"),
    ("families.reference", "families.sm80", "families.sm90", "families.standard"),
    (
        "families.backward",
        "families.backward.reference",
        "families.backward.sm80",
        "families.backward.sm90",
        "families.backward.standard",
    ),
    ("families.sm90_fp8",),
    ("fp8.gpu_tensors", "fp8.plan"),
    ("fp8.gpu",),
    ("fp8.quantize",),
    ("fp8.attention",),
    ("fp8", "fp8.baselines", "fp8.distributions"),
    ("fp8.sweeps",),
    ("dispatch",),
    ("calls", "environment", "precompile"),
    ("api", "backward"),
    ("",),
    ("check", "cli_shared", "fp8.problems", "fp8.records"),
    ("check_gradients", "cli_kernels", "fp8.experiment", "fp8.figures"),
    ("cli_fp8",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
MAY_IMPORT_CUPY = ("arrays", "environment", "check", "families.", "runtime.", "fp8.gpu")
THIRD_PARTY = {"numpy", "ml_dtypes", "cupy", "cupy_backends", "filelock", "matplotlib"}


@dataclass(frozen=True)
class Import:
    """One import statement's target: a module of the package, relative to it, or another one."""

    target: str
    own: bool
    in_function: bool
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(name: str, source: str | None = None) -> list[Import]:
    path = FILES[name]
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source)
    package = ["cuflash", *filter(None, name.split("."))]
    if path.name != "__init__.py":
        package.pop()
    return list(_imports(tree, package, False))


def _imports(node: ast.AST, package: list[str], in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield _resolved(alias.name, in_function, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) + 1 - child.level] if child.level else []
            start = ".".join([*base, *filter(None, [child.module])])
            for alias in child.names:
                whole = f"{start}.{alias.name}"
                is_module = whole.removeprefix("cuflash.") in FILES
                yield _resolved(whole if is_module else start, in_function, child.lineno)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _imports(child, package, in_function or is_function)


def _resolved(name: str, in_function: bool, line: int) -> Import:
    own = name == "cuflash" or name.startswith("cuflash.")
    target = name.removeprefix("cuflash").lstrip(".") if own else name
    return Import(target, own, in_function, line)


def upward(name: str, found: list[Import]) -> list[Import]:
    """Imports that break the order of the layers."""
    return [i for i in found if i.own and HEIGHT[i.target] >= HEIGHT[name]]


def misplaced_cupy(name: str, found: list[Import]) -> list[Import]:
    allowed = any(name == place or name.startswith(place) for place in MAY_IMPORT_CUPY)
    cupy = [i for i in found if i.target.split(".")[0] in ("cupy", "cupy_backends")]
    return [i for i in cupy if not (allowed and i.in_function)]


def test_every_module_has_a_layer() -> None:
    assert set(FILES) == set(HEIGHT), "LAYERS above says where each module stands"
    assert sum(map(len, LAYERS)) == len(HEIGHT)


@pytest.mark.parametrize("name", FILES, ids=lambda name: name or "cuflash")
def test_imports_run_downward(name: str) -> None:
    assert upward(name, imports_of(name)) == []


@pytest.mark.parametrize("name", FILES, ids=lambda name: name or "cuflash")
def test_cupy_is_imported_inside_functions_of_few_modules(name: str) -> None:
    assert misplaced_cupy(name, imports_of(name)) == []


@pytest.mark.parametrize("name", FILES, ids=lambda name: name or "cuflash")
def test_only_declared_packages_are_imported(name: str) -> None:
    roots = {i.target.split(".")[0] for i in imports_of(name) if not i.own}
    assert roots <= THIRD_PARTY | sys.stdlib_module_names


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("runtime.")])
def test_the_runtime_knows_nothing_of_attention(name: str) -> None:
    own = {i.target for i in imports_of(name) if i.own}
    assert all(target == "runtime" or target.startswith("runtime.") for target in own)


def test_the_oracle_shares_no_code() -> None:
    assert not [i for i in imports_of("oracle") if i.own]


def test_the_reader_of_imports_sees_each_form() -> None:
    """Else the tests above would pass on anything."""
    source = """
from . import dispatch, families
from .runtime.device import Device
from .runtime import device, nothing
import cuflash.api
from cuflash import check
def f():
    import cupy.cuda
    class C:
        from .cli import main
"""
    found = [(i.target, i.in_function) for i in imports_of("arrays", source)]
    assert found == [
        ("dispatch", False), ("families", False), ("runtime.device", False),
        ("runtime.device", False), ("runtime", False), ("api", False), ("check", False),
        ("cupy.cuda", True), ("cli", True),
    ]  # fmt: skip
    above = [i.target for i in upward("arrays", imports_of("arrays", source))]
    assert "dispatch" in above
    assert "cli" in above
    inside = imports_of("families.standard", "from . import reference\nfrom .. import api\n")
    assert [i.target for i in inside] == ["families.reference", "api"]
    assert misplaced_cupy("arrays", imports_of("arrays", "import cupy"))
    assert misplaced_cupy("spec", imports_of("spec", "def f():\n    import cupy"))
    assert not misplaced_cupy("arrays", imports_of("arrays", "def f():\n    import cupy"))


def in_fresh_process(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def test_importing_loads_neither_cupy_nor_scipy() -> None:
    loaded = in_fresh_process("import sys, cuflash; print(*sys.modules)").split()
    assert "cuflash.api" in loaded
    for package in ("cupy", "cupy_backends", "scipy", "ml_dtypes", "matplotlib", "torch"):
        assert package not in loaded
    assert not {"cuflash.cli", "cuflash.check", "cuflash.families.standard"} & set(loaded)


def test_attention_on_the_cpu_needs_no_cupy() -> None:
    code = """
import sys
sys.modules["cupy"] = None
import numpy as np, cuflash
q = np.ones((3, 4), np.float32)
print(cuflash.attention(q, q, q).sum(), cuflash.explain(q, q, q).family)
print("CuPy" in str(cuflash.info()))
"""
    assert in_fresh_process(code).split() == ["12.0", "reference", "True"]


def test_importing_is_quick() -> None:
    """Processor time beside that of NumPy alone, which is a part of it: machines differ, and one
    does by the hour. The first pair fills the file cache. What else the machine does only adds.
    """
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    names = ("cuflash", "numpy")
    pairs = [[float(in_fresh_process(code.format(n))) for n in names] for _ in range(6)]
    ours, numpys = (min(times) for times in zip(*pairs[1:], strict=True))
    assert ours < 3 * numpys, pairs
