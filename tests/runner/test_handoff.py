"""Hand-offs between runner processes with the simulated engine, and what a death of either costs."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tandem.engines.base import PrefillPort
from tandem.runner.stream import Stream
from tandem.types import Event, Finished, GenerationRequest, HandoffStatistics, Sampling, TokenPrompt

from .conftest import MakeSupervisor, Watched, collect, first_text, text_of

pytestmark = pytest.mark.anyio

SMALL: dict[str, object] = {"layers": 2, "head_dim": 16}
REST_SECONDS = 15.0
"""Half of what the prompts that are given up would take."""
SECRET = "a secret for these two"


def ask(seed: int, length: int, max_tokens: int = 6) -> GenerationRequest:
    """A greedy request with a prompt of `length` tokens."""
    tokens = tuple((seed * 7919 + index * index) % 256 for index in range(length))
    return GenerationRequest(
        TokenPrompt(tokens), max_tokens=max_tokens, ignore_eos=True, sampling=Sampling(temperature=0)
    )


def handoff_of(events: list[Event]) -> HandoffStatistics:
    """The hand-off's statistics of an answer that has ended well."""
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1].statistics.handoff


class Pair:
    """A runner that prefills quickly, and one that has prompts prefilled there."""

    def __init__(self, prefill: Watched, decode: Watched) -> None:
        self.prefill = prefill
        self.decode = decode

    @classmethod
    async def make(cls, make_supervisor: MakeSupervisor, *, prefill_tps: float = 4000.0, secret: str = "") -> Pair:
        shared: dict[str, object] = {"cluster_secret": secret, "prefill_chunk": 128}
        prefill = await make_supervisor(
            options={"kv_port": 0, "node_id": "prefill"} | shared, prefill_tps=prefill_tps, **SMALL
        )
        assert prefill.kv_address is not None
        peers = (PrefillPort(f"127.0.0.1:{prefill.kv_address[1]}"),)
        decode = await make_supervisor(options={"prefill_peers": peers, "node_id": "decode"} | shared, **SMALL)
        return cls(prefill, decode)

    async def local(self, request: GenerationRequest) -> str:
        """The text that the prefill runner gives by itself."""
        return text_of(await collect(self.prefill.submit(request)))

    async def remote_under_way(self, request: GenerationRequest) -> Stream:
        """A request to the decode runner, of which the prefill runner has computed some."""
        before = (await self.prefill.heartbeat()).steps
        stream = self.decode.submit(request)
        while (await self.prefill.heartbeat()).steps < before + 2:
            pass
        return stream

    async def prefill_rests(self) -> None:
        """Wait until the prefill runner makes no steps any more."""
        steps = -1
        async with asyncio.timeout(REST_SECONDS):
            while steps != (steps := (await self.prefill.heartbeat()).steps):
                pass


@pytest.mark.parametrize("secret", ["", SECRET])
async def test_between_two_processes(make_supervisor: MakeSupervisor, secret: str) -> None:
    pair = await Pair.make(make_supervisor, secret=secret)
    for length in (2, 129, 400, 3000):
        events = await collect(pair.decode.submit(ask(length, length)))
        handoff = handoff_of(events)
        assert text_of(events) == await pair.local(ask(length, length))
        if length == 400:
            # The first prompt that is long enough for a trial.
            assert (handoff.prefill, handoff.peer) == ("remote", "prefill")
            assert (handoff.remote_tokens, handoff.local_tokens) == (399, 1)
            assert handoff.bytes == 399 * 512


async def test_a_killed_prefill_runner_costs_only_the_rest(make_supervisor: MakeSupervisor) -> None:
    pair = await Pair.make(make_supervisor, prefill_tps=1000.0)
    request = ask(1, 6000)
    stream = await pair.remote_under_way(request)
    assert pair.prefill.pid is not None
    os.kill(pair.prefill.pid, signal.SIGKILL)
    events = await collect(stream)
    handoff = handoff_of(events)
    assert handoff.prefill == "partial"
    assert 0 < handoff.remote_tokens < 5999
    assert handoff.remote_tokens + handoff.local_tokens == 6000
    assert pair.decode.restarts == 0
    # Nobody is asked now, and the answer is the same.
    again = await collect(pair.decode.submit(request))
    assert handoff_of(again).prefill == "local"
    assert text_of(again) == text_of(events)
    await pair.prefill.reach("ready", restarts=1)
    assert await pair.local(ask(2, 300)) == text_of(await collect(pair.decode.submit(ask(2, 300))))


async def test_a_killed_decode_runner_frees_the_prefill_runner(make_supervisor: MakeSupervisor) -> None:
    pair = await Pair.make(make_supervisor, prefill_tps=1000.0)
    stream = await pair.remote_under_way(ask(2, 30_000))
    assert pair.decode.pid is not None
    os.kill(pair.decode.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="signal 9"):
        await collect(stream)
    await pair.prefill_rests()
    await pair.decode.reach("ready", restarts=1)
    events = await collect(pair.decode.submit(ask(4, 400)))
    assert handoff_of(events).prefill == "remote"


async def test_cancelling_at_the_decode_runner_frees_the_prefill_runner(make_supervisor: MakeSupervisor) -> None:
    pair = await Pair.make(make_supervisor, prefill_tps=1000.0)
    stream = await pair.remote_under_way(ask(5, 30_000))
    other = pair.decode.submit(ask(6, 100, 50))
    await first_text(other)
    await stream.aclose()
    await pair.prefill_rests()
    load = await pair.decode.heartbeat()
    assert load.prefilling == 0
    await other.aclose()
    events = await collect(pair.decode.submit(ask(7, 400)))
    assert text_of(events) == await pair.local(ask(7, 400))
