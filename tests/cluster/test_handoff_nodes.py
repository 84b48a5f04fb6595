"""Two nodes with runners of their own, a real model, and a prefill runner that is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator

import pytest

from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.engines.mlx.pace import CPU_PREFILL_CHUNK
from tandem.errors import InvalidRequestError, NotFoundError
from tandem.models.packaged import INSTALL_HINT, packaged_gguf
from tandem.types import (
    Finished,
    GenerationRequest,
    HandoffStatistics,
    PrefillProgress,
    Sampling,
    TextDelta,
    TokenPrompt,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(packaged_gguf() is None, reason=INSTALL_HINT),
]

PROMPT_TOKENS = int(os.environ.get("TANDEM_HANDOFF_TOKENS", "1000"))
"""4,000 is the length of the promise; it takes five minutes on two cores."""
KILL_AT = 0.6
DEADLINE = 600.0


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node]]:
    """One with a KV port, one without peers yet."""
    made: list[Node] = []
    for name, port in (("prefill", 0), ("decode", -1)):
        # The converted model is shared, the identity is not.
        settings = Settings(
            home=tmp_path_factory.mktemp(name),
            kv_port=port,
            automatic_links=False,
            cluster_secret="a secret of sixteen",
        )
        made.append(Node(settings))
    for node in made:
        await node.start()
        instance = await node.launch(await node.models.obtain("demo"))
        await node.wait_ready(instance, DEADLINE)
    yield made[0], made[1]
    for node in made:
        await node.stop()


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return [random.Random(seed * 100_000 + index).randrange(1000, 40_000) for index in range(tokens)]


async def answer(
    node: Node, tokens: list[int], *, kill_at: float = 2.0, victim: int = 0
) -> tuple[str, HandoffStatistics, int]:
    """Text, hand-off statistics, and how much was computed when the victim was killed."""
    request = GenerationRequest(
        TokenPrompt(tuple(tokens)), max_tokens=16, sampling=Sampling(temperature=0.0), use_prefix_cache=False
    )
    text, killed = "", 0
    async with asyncio.timeout(DEADLINE):
        async for events in node.generate("default", request):
            for event in events:
                if (
                    isinstance(event, PrefillProgress)
                    and not killed
                    and event.processed_tokens >= kill_at * len(tokens)
                ):
                    killed = event.processed_tokens
                    os.kill(victim, signal.SIGKILL)
                if isinstance(event, TextDelta):
                    text += event.text
                if isinstance(event, Finished):
                    return text, event.statistics.handoff, killed
    raise AssertionError("the answer has no end")


async def test_a_prefill_runner_killed_at_60_percent(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    [there], [here] = prefill.instances(), decode.instances()
    assert there.kv_address is not None
    assert there.pid is not None
    tokens = prompt(1)
    expected, local, _ = await answer(decode, tokens)
    assert local.prefill == "local"
    decode.name_peers(here.instance_id, [f"127.0.0.1:{there.kv_address[1]}"])
    # The first prompt is tried remotely, to learn the peer's speed: no need to force anything.
    text, handoff, killed = await answer(decode, tokens, kill_at=KILL_AT, victim=there.pid)
    print(f"killed at {killed} of {PROMPT_TOKENS} tokens; {handoff.local_tokens} were computed here")
    assert text == expected
    assert handoff.prefill == "partial"
    assert handoff.remote_tokens + handoff.local_tokens == PROMPT_TOKENS
    assert handoff.local_tokens <= PROMPT_TOKENS - killed + CPU_PREFILL_CHUNK
    await prefill.wait_ready(there.instance_id, DEADLINE)


async def test_a_whole_prompt_afterwards(nodes: tuple[Node, Node]) -> None:
    """The restarted runner listens at another port; naming it is all it takes."""
    prefill, decode = nodes
    [there], [here] = prefill.instances(), decode.instances()
    assert there.kv_address is not None
    tokens = prompt(2, 600)
    decode.name_peers(here.instance_id, [])
    expected, _, _ = await answer(decode, tokens)
    decode.name_peers(here.instance_id, [f"127.0.0.1:{there.kv_address[1]}"])
    text, handoff, _ = await answer(decode, tokens)
    assert text == expected
    assert handoff.prefill == "remote"
    assert handoff.remote_tokens == 599


async def test_peers_that_cannot_be(nodes: tuple[Node, Node]) -> None:
    _, decode = nodes
    [here] = decode.instances()
    with pytest.raises(NotFoundError, match="no instance"):
        decode.name_peers("nobody", [])
    with pytest.raises(InvalidRequestError, match="host:port"):
        decode.name_peers(here.instance_id, ["somewhere"])
    assert all("somewhere" not in peer for peer in decode.prefill_peers(here.instance_id))
