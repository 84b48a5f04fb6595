"""Whatever happens to the runner, every request ends, and the next one works."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from tandem.errors import (
    ConfigError,
    CorruptModelError,
    DownloadError,
    EngineError,
    InstanceNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RunnerDiedError,
    TandemError,
    UnsupportedError,
)
from tandem.runner.messages import MAX_FRAME_BYTES
from tandem.types import Accepted, ChatPrompt, Event, Finished, GenerationRequest, TokenPrompt

from .conftest import DEADLINE, MakeSupervisor, ask, collect, first_text, is_alive, text_of

pytestmark = pytest.mark.anyio


async def test_answers_and_reports_its_model(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor()
    assert supervisor.info is not None
    assert supervisor.info.engine == "sim"
    events = await collect(supervisor.submit(ask(max_tokens=5)))
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 5
    assert len(text_of(events).split()) == 5
    assert supervisor.running == 0


async def test_many_at_once_get_their_own_answers(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor()
    alone = [text_of(await collect(supervisor.submit(ask(f"prompt {number}")))) for number in range(40)]
    streams = [supervisor.submit(ask(f"prompt {number}")) for number in range(40)]
    together = [text_of(events) for events in await asyncio.gather(*(collect(stream) for stream in streams))]
    assert together == alone
    assert len(set(alone)) == len(alone)


async def test_killed_runner_ends_its_streams_and_comes_back(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(decode_tps=50, answer_tokens=10_000)
    streams = [supervisor.submit(ask(max_tokens=None)) for _ in range(3)]
    for stream in streams:
        await first_text(stream)
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(RunnerDiedError, match="signal 9"):
            await collect(stream)
    with pytest.raises(InstanceNotReadyError):
        supervisor.submit(ask())
    await supervisor.reach("ready", restarts=1)
    assert supervisor.pid != pid
    assert text_of(await collect(supervisor.submit(ask())))


@pytest.mark.parametrize("status", [0, 1, 7])
async def test_any_exit_during_a_request_is_its_error(make_supervisor: MakeSupervisor, status: int) -> None:
    supervisor = await make_supervisor(die_at_token=3, die_status=status)
    stream = supervisor.submit(ask())
    with pytest.raises(RunnerDiedError, match=f"exit status {status}"):
        await collect(stream)
    await supervisor.reach("ready", restarts=1)


async def test_text_before_a_death_is_delivered(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(die_at_token=4, decode_tps=20)
    stream = supervisor.submit(ask())
    seen: list[Event] = []

    async def read() -> None:
        async for events in stream:
            seen.extend(events)

    with pytest.raises(RunnerDiedError):
        await read()
    assert len(text_of(seen).split()) == 3


async def test_an_engine_that_stops_stepping_is_restarted(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(hang_at_token=3, settings={"step_deadline": 1.5})
    with pytest.raises(RunnerDiedError, match="no step for"):
        await collect(supervisor.submit(ask()))
    await supervisor.reach("ready", restarts=1)


async def test_a_frozen_process_is_noticed(make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.runner.supervisor.HEARTBEAT_DEADLINE_SECONDS", 2.5)
    supervisor = await make_supervisor(decode_tps=20, answer_tokens=10_000)
    stream = supervisor.submit(ask(max_tokens=None))
    await first_text(stream)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    with pytest.raises(RunnerDiedError, match="no sign of life"):
        await collect(stream)
    await supervisor.reach("ready", restarts=1)


async def test_loading_without_progress_is_given_up(make_supervisor: MakeSupervisor) -> None:
    settings = {"load_deadline": 1.0, "max_restarts": 0}
    supervisor = await make_supervisor(load_seconds=600, layers=1, settings=settings)
    assert supervisor.state == "failed"
    assert supervisor.error is not None
    assert "no progress" in supervisor.error.message
    with pytest.raises(InstanceNotReadyError, match="no progress"):
        supervisor.submit(ask())


async def test_slow_loading_with_progress_is_fine(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(load_seconds=6.0, layers=12, settings={"load_deadline": 4.0})
    assert supervisor.state == "ready"
    assert supervisor.progress == (12, 12)


async def test_a_damaged_model_is_not_tried_again(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(fail_at_load=True)
    assert supervisor.state == "failed"
    assert supervisor.restarts == 0
    assert supervisor.error is not None
    assert supervisor.error.code == "corrupt_model"


def test_what_cannot_change_by_itself_is_permanent() -> None:
    for error in (ConfigError, CorruptModelError, UnsupportedError):
        assert error.permanent
    for error in (DownloadError, EngineError, RunnerDiedError, InstanceNotReadyError):
        assert not error.permanent


async def test_not_ready_says_so(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(ready=False, load_seconds=1.0)
    with pytest.raises(InstanceNotReadyError, match=r"starting|loading") as caught:
        supervisor.submit(ask())
    assert caught.value.retry_after


async def test_full_queue_refuses_at_once(make_supervisor: MakeSupervisor) -> None:
    limits = {"max_batch": 2, "max_queue": 3}
    supervisor = await make_supervisor(decode_tps=20, answer_tokens=10_000, settings=limits)
    streams = [supervisor.submit(ask(max_tokens=None)) for _ in range(5)]
    with pytest.raises(QueueFullError) as caught:
        supervisor.submit(ask())
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1
    await streams[0].aclose()
    streams[0] = supervisor.submit(ask(max_tokens=2))
    for stream in streams[1:]:
        await stream.aclose()
    assert isinstance((await collect(streams[0]))[-1], Finished)


async def test_bad_requests_hurt_nobody_else(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(decode_tps=100)
    good = [supervisor.submit(ask(f"good {number}", 20)) for number in range(4)]
    bad = [
        supervisor.submit(GenerationRequest(ChatPrompt(messages=()))),
        supervisor.submit(GenerationRequest(TokenPrompt((10**9,)))),
        supervisor.submit(ask("x" * 40_000)),
    ]
    for stream in bad:
        with pytest.raises(InvalidRequestError):
            await collect(stream)
    for stream in good:
        assert isinstance((await collect(stream))[-1], Finished)
    assert supervisor.restarts == 0


async def test_a_thousand_cancelled_requests_leave_nothing(make_supervisor: MakeSupervisor) -> None:
    limits = {"max_batch": 4, "max_queue": 2000}
    supervisor = await make_supervisor(decode_tps=200, answer_tokens=10_000, settings=limits)
    threads = threading.active_count()
    streams = [supervisor.submit(ask(f"prompt {number}", None)) for number in range(1000)]
    await first_text(streams[0])
    for stream in streams:
        await stream.aclose()
        await stream.aclose()
    assert supervisor.running == 0
    events = await collect(supervisor.submit(ask()))
    assert isinstance(events[-1], Finished)
    load = await supervisor.heartbeat()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    assert threading.active_count() <= threads
    assert supervisor.restarts == 0


async def test_stopping_ends_streams_and_the_process(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(decode_tps=20, answer_tokens=10_000)
    stream = supervisor.submit(ask(max_tokens=None))
    await first_text(stream)
    pid = supervisor.pid
    assert pid is not None
    await supervisor.stop()
    with pytest.raises(TandemError):
        await collect(stream)
    assert not is_alive(pid)


async def test_stopping_while_loading(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor(ready=False, load_seconds=600, layers=600)
    await supervisor.reach("loading")
    pid = supervisor.pid
    assert pid is not None
    async with asyncio.timeout(DEADLINE):
        await supervisor.stop()
    assert not is_alive(pid)
    assert supervisor.state == "stopped"


async def test_an_oversized_frame_is_refused_before_memory_is_taken(make_supervisor: MakeSupervisor) -> None:
    supervisor = await make_supervisor()
    runner = supervisor._runner
    assert runner is not None
    runner.writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    await supervisor.reach("ready", restarts=1)
    assert text_of(await collect(supervisor.submit(ask())))
