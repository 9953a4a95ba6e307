"""Memory over the length, the longest that fits, and main-memory traffic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cli, io, memory
from bench.io import bytes_of_cases, predicted
from bench.peers.largest import largest_of
from bench.shapes import Problem
from cuflash import io_bytes
from cuflash.runtime import device


def points(exponent: float, constant: float = 0.0) -> list[dict[str, Any]]:
    lengths = [1 << n for n in range(10, 21)]
    return [
        {"column": "cuflash", "seq": n, "bytes": constant + 100 * n**exponent, "ms": 1e-9 * n**2}
        for n in lengths
    ]


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_the_exponent_of_what_grows_is_found(exponent: float) -> None:
    found = memory.fit(points(exponent), "cuflash")
    assert found is not None
    assert found["exponent"] == pytest.approx(exponent)
    assert found["time_exponent"] == pytest.approx(2.0)
    assert (found["from"], found["to"]) == (1 << 15, 1 << 20)


def test_a_workspace_of_fixed_size_does_not_bend_the_fit() -> None:
    found = memory.fit(points(1.0, constant=1e5), "cuflash")
    assert found is not None
    assert 0.95 <= found["exponent"] <= 1.05
    assert memory.fit(points(1.0)[:2], "cuflash") is None
    assert memory.fit(points(1.0), "standard") is None
    few = memory.fit(points(2.0)[:3], "cuflash")
    assert few is not None
    assert few["from"] == 1024


@pytest.mark.skipif(not device.unavailable_reason(), reason="there is a GPU")
def test_on_a_cpu_ours_grows_with_the_length_and_scores_with_its_square(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    words = ["--seqs", "512,1024,2048,4096", "--window-ms", "1", "--settle-ms", "1"]
    assert cli.main(["memory", *words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["benches"]["memory"]
    exponents = {row["column"]: row["exponent"] for row in rows if "exponent" in row}
    assert exponents["cuflash"] < 1.1
    assert exponents["blas"] > 1.8
    for row in rows:
        if "bytes" in row:
            assert row["bytes"] >= row["of_them_inputs_and_result"]


@pytest.mark.parametrize("capacity", [0, 99, 100, 5000, 6399, 6400, 10**6])
def test_the_largest_that_fits_is_found_in_few_tries(capacity: int) -> None:
    tries: list[int] = []

    def fits(size: int) -> bool:
        tries.append(size)
        return size <= capacity

    found = largest_of(fits, 6400)
    assert found == min(capacity, 6400) // 100 * 100
    assert len(tries) <= 7


CSV = """\
==PROF== Connected to process 12
==PROF== Profiling "bench_case_0": 0%....100% - 1 pass
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","12","bench_case_0","10","20"
"1","12","void nvjet<int, float>(a, b)","1,000","200"
"2","12","softmax_rows","3000","400"
"3","12","bench_evict","999999","50"
"4","12","bench_case_1","10","20"
"5","12","cuflash_fwd_sm90_d64","7000","800"
"6","12","bench_evict","999999","60"
"""


def test_bytes_are_those_between_a_case_and_the_next() -> None:
    """What the kernel that empties the cache writes, the case left there."""
    assert bytes_of_cases(CSV) == {0: 1000 + 200 + 3000 + 400 + 50, 1: 7000 + 800 + 60}
    with pytest.raises(ValueError, match="printed no table"):
        bytes_of_cases("==ERROR== no permission\n")
    with pytest.raises(ValueError, match="counted nothing"):
        bytes_of_cases("".join(CSV.splitlines(keepends=True)[2:4]))


def test_the_prediction_is_that_of_io_bytes() -> None:
    problem = Problem(2, 8, 8, 1024, 1024, 64)
    traffic = io_bytes(problem.q_shape)
    assert predicted(problem, "cuflash") == traffic.tiled.total == problem.moved_bytes
    pairs = 2 * 8 * 1024 * 1024
    assert predicted(problem, "standard") == traffic.tiled.total + pairs * (2 * 4 + 2 * 2)


class FakeProfiler:
    """ncu, which answers with what it is told to."""

    def __init__(self, folder: Path, output: str, status: int = 0) -> None:
        self.path = folder / "ncu"
        (folder / "output").write_text(output)
        (folder / "arguments").write_text("")
        self.path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/arguments\ncat {folder}/output\n'
            f"exit {status}\n"
        )
        self.path.chmod(0o755)

    @property
    def arguments(self) -> list[str]:
        return (self.path.parent / "arguments").read_text().splitlines()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine with a GPU and with what is in the folder on its path."""
    monkeypatch.setattr("bench.session.device.unavailable_reason", lambda: "")
    fields = dict.fromkeys(("cuflash", "python", "numpy", "blas", "cupy", "cuda"), "1")
    found = SimpleNamespace(**fields, devices=("CPU",))
    monkeypatch.setattr("bench.results.cuflash.info", lambda: found)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_measured_bytes_stand_beside_the_prediction(on_gpu: Path) -> None:
    profiler = FakeProfiler(on_gpu, CSV)
    file = on_gpu / "io.json"
    assert cli.main(["io", "--seqs", "2048", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["benches"]["io"]
    assert [(row["column"], row["seq"], row["measured"]) for row in rows] == [
        ("cuflash", 2048, 4650), ("standard", 2048, 7860),
    ]  # fmt: skip
    assert rows[0]["predicted"] == 4 * 2 * 16384 * 2048
    assert "--profile-from-start" in profiler.arguments
    assert f"{io._READ},{io._WRITTEN}" in profiler.arguments
    cases = json.loads(profiler.arguments[-1])
    assert [case["kernel"] for case in cases] == ["auto", "standard"]


def test_a_profiler_that_may_not_count_is_a_skip(on_gpu: Path) -> None:
    FakeProfiler(on_gpu, "==ERROR== ERR_NVGPUCTRPERM - no permission\n", status=1)
    file = on_gpu / "io.json"
    assert cli.main(["io", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["benches"] == {}
    assert record["skipped"] == ["io: ==ERROR== ERR_NVGPUCTRPERM - no permission"]


def test_without_a_profiler_the_bench_says_so(on_gpu: Path) -> None:
    file = on_gpu / "io.json"
    assert cli.main(["io", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["skipped"] == ["io: needs Nsight Compute's ncu on the path"]
