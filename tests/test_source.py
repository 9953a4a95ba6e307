"""CUDA sources become one text, whose lines the compiler reports as they are on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiling import write_sources

from cuflash.runtime import source
from cuflash.runtime.specialisation import Specialisation


def origins(text: str) -> dict[str, tuple[str, int]]:
    """File and line of each line, as a compiler reads the `#line` directives."""
    found: dict[str, tuple[str, int]] = {}
    name, number = "", 0
    for line in text.splitlines():
        if marker := re.fullmatch(r'#line (\d+) "(.*)"', line):
            name, number = marker[2], int(marker[1])
            continue
        if line:
            found[line] = (name, number)
        number += 1
    return found


def test_headers_are_put_in_once_and_lines_keep_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(
        tmp_path,
        monkeypatch,
        kernels__main_cu='// main\n#include "local.cuh"\n  # include  "common/b.cuh" // twice\n'
        "#include <cuda_fp16.h>\nint main_end;\n",
        kernels__local_cuh='#pragma once\n#include "../common/a.cuh"\nint local;\n',
        common__a_cuh='#include "common/b.cuh"\n\nint a;\n',
        common__b_cuh="int b;\n",
    )
    text = source.expand("kernels/main.cu")
    assert text.count("int b;") == 1
    assert "#pragma once" not in text
    assert '#include "' not in text
    assert origins(text) == {
        "// main": ("kernels/main.cu", 1),
        "int b;": ("common/b.cuh", 1),
        "int a;": ("common/a.cuh", 3),
        "int local;": ("kernels/local.cuh", 3),
        "#include <cuda_fp16.h>": ("kernels/main.cu", 4),
        "int main_end;": ("kernels/main.cu", 5),
    }


def test_a_header_beside_the_includer_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(
        tmp_path, monkeypatch, k__m_cu='#include "x.cuh"\n', k__x_cuh="near\n", x_cuh="far\n"
    )
    assert "near" in source.expand("k/m.cu")
    (tmp_path / "k/x.cuh").unlink()
    assert "far" in source.expand("k/m.cu")


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        (
            {"m_cu": '\n#include "gone.cuh"\n'},
            FileNotFoundError,
            ['m.cu:2: #include "gone.cuh"', "no gone.cuh below"],
        ),
        (
            {"k__m_cu": '#include "gone.cuh"\n'},
            FileNotFoundError,
            ["k/m.cu:1", "no k/gone.cuh nor gone.cuh below"],
        ),
        ({"m_cu": '#include "../m.cu"\n'}, FileNotFoundError, ["m.cu:1", "no ../m.cu below"]),
        ({"m_cu": '#include "m.cu"\n'}, ValueError, ["m.cu:1", "m.cu -> m.cu"]),
        (
            {
                "m_cu": '#include "a.cuh"\n',
                "a_cuh": '\n#include "b.cuh"\n',
                "b_cuh": '#include "a.cuh"',
            },
            ValueError,
            ["b.cuh:1", "m.cu -> a.cuh -> b.cuh -> a.cuh"],
        ),
        (
            {"m_cu": '#if CONFIG_X\n#include "a.cuh"\n#endif\n', "a_cuh": ""},
            ValueError,
            ["m.cu:2", "under a condition"],
        ),
    ],
    ids=["missing", "missing-beside", "outside", "itself", "circle", "condition"],
)
def test_what_can_not_be_expanded_is_told(
    files: dict[str, str],
    error: type[Exception],
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_sources(tmp_path, monkeypatch, **files)
    name = "k/m.cu" if "k__m_cu" in files else "m.cu"
    with pytest.raises(error) as caught:
        source.expand(name)
    for fragment in says:
        assert fragment in str(caught.value)


def test_conditions_that_end_before_an_include_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(
        tmp_path,
        monkeypatch,
        m_cu='#ifdef A\n#if B\n#else\n#endif\n#endif\n#include "a.cuh"\n',
        a_cuh="int a;\n",
    )
    assert origins(source.expand("m.cu"))["int a;"] == ("a.cuh", 1)


def test_every_source_of_the_package_expands() -> None:
    sources = [path.relative_to(source.root()).as_posix() for path in source.root().rglob("*.cu")]
    assert sources
    for name in sources:
        assert '#include "' not in source.expand(name)


# --- specialisations -----------------------------------------------------------------------------


def test_a_specialisation_defines_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path, monkeypatch, m_cu="int m;\n")
    config = (("head_dim", 64), ("causal", True), ("SOFTCAP", False), ("element", "Float16"))
    spec = Specialisation("m.cu", "cuflash_m", config)
    assert spec.text() == (
        "#define CONFIG_HEAD_DIM 64\n#define CONFIG_CAUSAL 1\n#define CONFIG_SOFTCAP 0\n"
        "#define CONFIG_ELEMENT Float16\n#define CONFIG_NAME cuflash_m\n"
        '#line 1 "m.cu"\nint m;\n'
    )
    assert hash(spec) == hash(Specialisation("m.cu", "cuflash_m", config))
    assert spec != Specialisation("m.cu", "cuflash_m", config, exact_arch=True)


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("cuflash-m", (), "name: got 'cuflash-m'"),
        ("9", (), "name: got '9'"),
        ("m", (("a b", 1),), "'A B'"),
        ("m", (("name", "x"),), "'NAME'"),
        ("m", (("d", 1), ("D", 2)), "'D'"),
        ("m", (("d", "1\n#error"),), "more than one line"),
    ],
)
def test_a_configuration_that_c_does_not_take_is_refused(
    name: str, config: tuple[tuple[str, int | str], ...], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Specialisation("m.cu", name, config)
