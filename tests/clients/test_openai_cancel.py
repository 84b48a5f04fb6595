"""The official `openai` package: whoever stops listening stops the work."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from .server import Server

pytestmark = pytest.mark.clients

BODY: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20_000}


def test_a_timeout(sim_client: openai.OpenAI, sim_server: Server) -> None:
    impatient = sim_client.with_options(timeout=1)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(impatient.chat.completions.create, **BODY)
        sim_server.wait_busy("slow")
        with pytest.raises(openai.APITimeoutError):
            call.result()
    sim_server.wait_idle("slow")


def test_a_stream_left_in_the_middle(sim_client: openai.OpenAI, sim_server: Server) -> None:
    with sim_client.chat.completions.create(**BODY, stream=True) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break
        sim_server.wait_busy("slow")
    sim_server.wait_idle("slow")


def test_several_answers_left_in_the_middle(sim_client: openai.OpenAI, sim_server: Server) -> None:
    with sim_client.completions.create(model="slow", prompt=["a", "b"], n=2, max_tokens=1000, stream=True) as stream:
        next(iter(stream))
        sim_server.wait_until(lambda: sim_server.busy("slow") == 4)
    sim_server.wait_idle("slow")


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_task(sim_server: Server, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=sim_server.v1, api_key="unused", timeout=60) as client:

        async def call() -> None:
            answer: Any = await client.chat.completions.create(**BODY, stream=stream)
            async for _ in answer:
                pass

        task = asyncio.create_task(call())
        await asyncio.to_thread(sim_server.wait_busy, "slow")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(sim_server.wait_idle, "slow")


def test_a_cancel_by_id(sim_client: openai.OpenAI, sim_server: Server) -> None:
    stream = sim_client.chat.completions.create(**BODY, stream=True)
    first = next(stream)
    sim_server.wait_busy("slow")
    sim_client.post(f"/cancel/{first.id}", cast_to=object)
    with pytest.raises(openai.APIError, match="cancelled") as caught:
        list(stream)
    assert caught.value.code == "cancelled"
    sim_server.wait_idle("slow")


def test_two_clients_do_not_disturb_each_other(sim_server: Server, sim_client: openai.OpenAI) -> None:
    with openai.OpenAI(base_url=sim_server.v1, api_key="unused", max_retries=0) as other:
        leaving = other.chat.completions.create(**BODY, stream=True)
        staying = sim_client.chat.completions.create(**{**BODY, "max_tokens": 60}, stream=True)
        next(leaving)
        next(staying)
        sim_server.wait_until(lambda: sim_server.busy("slow") == 2)
        leaving.close()
        sim_server.wait_until(lambda: sim_server.busy("slow") == 1)
        reasons = [chunk.choices[0].finish_reason for chunk in staying]
    assert reasons[-1] == "length"
    assert len(reasons) >= 60
    sim_server.wait_idle("slow")
