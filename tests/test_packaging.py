"""The wheel, built from the source distribution and installed elsewhere, is complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("cuflash", "cuda_src", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which the wheel was installed, far from the repository."""
    pytest.importorskip("build")
    work = tmp_path_factory.mktemp("packaging")
    tree = work / "tree"
    tree.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    dist, target = work / "dist", work / "site"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree, cwd=work)
    (wheel,) = dist.glob("*.whl")
    run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel),
        cwd=work,
    )
    return target


def test_the_installed_package_finds_its_cuda_sources(installed: Path) -> None:
    script = "from cuflash.runtime import source; print(source.root())"
    root = Path(run(sys.executable, "-c", script, cwd=installed.parent, PYTHONPATH=str(installed)))
    assert root.is_relative_to(installed)
    shipped = {
        path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    in_repository = {
        path.relative_to(ROOT / "cuda_src"): path.read_bytes()
        for path in (ROOT / "cuda_src").rglob("*")
        if path.is_file()
    }
    assert shipped == in_repository


def test_the_installed_package_works_and_is_typed(installed: Path) -> None:
    script = (
        "import numpy as np, cuflash; x = np.ones((4, 8)); "
        "print(cuflash.__file__, cuflash.attention(x, x, x).sum())"
    )
    path, total = run(
        sys.executable, "-c", script, cwd=installed.parent, PYTHONPATH=str(installed)
    ).split()
    assert Path(path).is_relative_to(installed)
    assert float(total) == 32.0
    assert (installed / "cuflash" / "py.typed").exists()


def test_the_tree_finds_its_cuda_sources() -> None:
    script = "from cuflash.runtime import source; print(source.root())"
    assert Path(run(sys.executable, "-c", script, cwd=ROOT)) == ROOT / "cuda_src"
