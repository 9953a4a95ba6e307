"""`pytest bench --benchmark-only` collects the benchmarks, and no doctests."""

from __future__ import annotations

from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files that are no tests: some import what may not be installed."""
    is_other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_other else None
