"""What a captured call allocates stays; by a stream that stands in for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.runtime import graphs


class Stream:
    """The current stream, captured or not."""

    def __init__(self) -> None:
        self.ptr, self.capturing = 1, False

    def is_capturing(self) -> bool:
        assert self.ptr, "the legacy default stream can't be asked"
        return self.capturing


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    cupy: Any = pytest.importorskip("cupy")
    found = Stream()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: found)
    monkeypatch.setattr(cupy, "asarray", lambda array, dtype: array.astype(dtype, copy=False))
    monkeypatch.setattr(cupy, "ascontiguousarray", lambda array: array)
    monkeypatch.setattr(graphs, "_kept", [])
    return found


def on_device(values: list[int], dtype: str) -> Any:
    """An array that is no `numpy.ndarray` of the host."""
    return np.array(values, dtype).view(type("DeviceArray", (np.ndarray,), {}))


def test_memory_is_kept_by_captures_alone(stream: Stream) -> None:
    graphs.keep("workspace")
    assert graphs._kept == []
    stream.capturing = True
    graphs.keep("workspace")
    graphs.keep("another")
    assert graphs._kept == ["workspace", "another"]
    stream.ptr = 0
    graphs.keep("of the legacy default stream, which no graph captures")
    assert len(graphs._kept) == 2


def test_lengths_of_the_host_are_refused_in_a_capture(stream: Stream) -> None:
    lens = np.array([3, 4])
    assert (graphs.lengths_on_device("kv_lens", lens) == lens).all()
    stream.capturing = True
    with pytest.raises(
        ValueError, match=r"^kv_lens: got lengths in host memory while a CUDA graph"
    ):
        graphs.lengths_on_device("kv_lens", lens)
    assert graphs._kept == []


def test_lengths_that_are_copied_stay_with_the_graph(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a kernel reads where the caller has them are the caller's to keep."""
    monkeypatch.setattr(graphs, "np", SimpleNamespace(ndarray=tuple, int64=np.int64))
    stream.capturing = True
    own, other = on_device([1, 2], "int64"), on_device([1, 2], "int32")
    assert graphs.lengths_on_device("q_lens", own) is own
    assert graphs._kept == []
    copied = graphs.lengths_on_device("q_lens", other)
    assert copied.dtype == np.int64
    assert len(graphs._kept) == 1
    assert graphs._kept[0] is copied
