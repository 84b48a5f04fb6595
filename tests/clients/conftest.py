"""Servers for clients: one with the packaged model for all tests that need real text, simulated ones for the rest."""

from __future__ import annotations

import os

# Clients must neither call home nor look for a hub: tests run where there is no network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from tandem.models.packaged import INSTALL_HINT, packaged_gguf

from .server import Server

PATIENCE = 240.0
"""Seconds a client waits: a machine that does something else besides may need a second for a token. For the same reason
modules with the real model have long timeouts."""


@pytest.fixture(scope="session")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def real_server(real_home: Path) -> Iterator[Server]:
    """SmolLM2-135M-Instruct."""
    if packaged_gguf() is None:
        pytest.skip(f"the packaged model is not installed: {INSTALL_HINT}")
    server = Server(real_home, "demo")
    yield server
    server.close()


_CALL = '<tool_call>{"name": "get_weather"%2C "arguments": {"city": "Paris"}}</tool_call>'
SIM_MODELS = {
    "fast": "answer_tokens=16,context_length=256",
    "slow": "decode_tps=20,answer_tokens=100000",
    "small": "context_length=64",
    "caller": f"answer_tokens=200,script={_CALL}",
}
"""Simulated models by their name, all of one server."""


@pytest.fixture(scope="session")
def sim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Models that answer at once and as they were told."""
    references = [f"sim:model_id={name}{',' if options else ''}{options}" for name, options in SIM_MODELS.items()]
    server = Server(tmp_path_factory.mktemp("sim"), *references)
    yield server
    server.close()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    """The SDK, pointed at the real model."""
    with openai.OpenAI(base_url=real_server.v1, api_key="unused", timeout=PATIENCE, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(real_server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=real_server.v1, api_key="unused", timeout=PATIENCE, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def sim_client(sim_server: Server) -> Iterator[openai.OpenAI]:
    """The SDK, pointed at the simulated models."""
    with openai.OpenAI(base_url=sim_server.v1, api_key="unused", timeout=60, max_retries=0) as client:
        yield client
