"""vLLM in a runner subprocess: it shows that it lives from the first second, answers, forgets what is cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engines.base import EngineOptions
from tandem.runner.messages import (
    Broken,
    Cancel,
    Heartbeat,
    Loaded,
    Loading,
    Outputs,
    Ready,
    Start,
    Stop,
    Submit,
    frame,
)
from tandem.types import Failure, Finished, GenerationRequest, Sampling, TextDelta, TokenPrompt
from tests.engines.conftest import VLLM
from tests.runner.test_process import receive, spawn

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.timeout(300)]

DEADLINE = 120.0
SILENCE = 20.0
"""Seconds; the supervisor takes a runner for dead after thirty."""


def ask(length: int, count: int) -> GenerationRequest:
    return GenerationRequest(
        TokenPrompt(tuple(range(20, 20 + length))),
        max_tokens=count,
        ignore_eos=True,
        sampling=Sampling(temperature=0.0),
    )


def test_a_runner_with_vllm(vllm_folder: Callable[[str], Path]) -> None:
    process, channel = spawn()
    channel.settimeout(DEADLINE)
    options = EngineOptions(engine="vllm", model_id="tiny", path=str(vllm_folder("llama")), context_length=2048)
    channel.sendall(frame(Start(options)))
    layers: list[int] = []
    beats = 0
    heard = time.monotonic()
    while not isinstance(message := receive(channel), Ready):
        assert time.monotonic() - heard < SILENCE
        heard = time.monotonic()
        assert not isinstance(message, Broken), message
        if isinstance(message, Loading):
            layers.append(message.done)
        if isinstance(message, Loaded):
            assert message.info.engine == "vllm"
        beats += isinstance(message, Heartbeat)
    assert layers == [1, 2, 3]
    assert beats > 1

    for request_id, request in (("stays", ask(40, 30)), ("goes", ask(300, 1500))):
        channel.sendall(frame(Submit(request_id, request)))
    text: dict[str, str] = {"stays": "", "goes": ""}
    cancelled = finished = False
    while not finished:
        message = receive(channel)
        assert not isinstance(message, Broken), message
        for request_id, events in message.outputs if isinstance(message, Outputs) else ():
            assert not any(isinstance(event, Failure) for event in events)
            text[request_id] += "".join(event.text for event in events if isinstance(event, TextDelta))
            finished |= any(isinstance(event, Finished) for event in events)
        if text["goes"] and not cancelled:
            cancelled = True
            channel.sendall(frame(Cancel("goes")))
    assert cancelled
    assert text["stays"]
    while not (isinstance(message := receive(channel), Heartbeat) and message.load.decoding == 0):
        pass
    assert message.load.cache_bytes == 0
    channel.sendall(frame(Stop()))
    assert process.wait(DEADLINE) == 0
    channel.close()
