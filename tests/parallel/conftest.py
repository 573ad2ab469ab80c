"""Tests that start processes, which takes seconds: `make quick` leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as slow."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("slow")
