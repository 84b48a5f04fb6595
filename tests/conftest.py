"""What holds for every test."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal

import pytest
from hypothesis import settings as hypothesis_settings

# Nodes of tests meet neither those of the person who runs them, nor those of another run.
os.environ["TANDEM_CLUSTER_NAME"] = f"test-{secrets.token_hex(8)}"
os.environ["TANDEM_CLUSTER_PORT"] = "0"
os.environ["TANDEM_CLUSTER_DISCOVERY"] = "false"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whoever runs the tests in the background of a shell ignores Ctrl-C, and so would every process the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A test must not fail because another process had the core for a moment.
hypothesis_settings.register_profile("tandem", deadline=None)
hypothesis_settings.load_profile("tandem")

LATER = ("real_model", "clients", "slow", "vllm")
"""Markers in the order in which their tests run, after all unmarked ones: what fails fast is seen first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by marker, stably. What needs vLLM skips without it, and what adds minutes unless it is asked for."""
    if "TANDEM_TEST_LONG" not in os.environ:
        skip = pytest.mark.skip(reason="minutes of it: set TANDEM_TEST_LONG=1 to run it")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed: tandem engines install vllm")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)
    items.sort(
        key=lambda item: max((LATER.index(name) + 1 for name in LATER if item.get_closest_marker(name)), default=0)
    )
