"""What holds for every test."""

from __future__ import annotations

import pytest

LATER = ("real_model", "clients", "slow")
"""Markers in the order in which their tests run, after all unmarked ones: what fails fast is seen first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by marker. Stable, so that tests of one file stay in their order."""
    items.sort(
        key=lambda item: max((LATER.index(name) + 1 for name in LATER if item.get_closest_marker(name)), default=0)
    )
