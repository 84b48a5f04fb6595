"""Two ends of the node port on real sockets, with a simulated engine in a real runner behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.instances import LocalInstances
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.nodeport.messages import HEADER, MAX_FRAME_BYTES, FrameParser, frame
from tandem.cluster.nodeport.server import NodePort
from tandem.config import Settings
from tandem.errors import (
    DeadlineError,
    InstanceNotReadyError,
    InvalidRequestError,
    NodeLostError,
    NotFoundError,
    RunnerDiedError,
    TandemError,
    UnavailableError,
    WireError,
)
from tandem.kv.tls import Authority
from tandem.runner.stream import Stream
from tandem.types import Accepted, Finished, GenerationRequest, TextDelta, TextPrompt

pytestmark = pytest.mark.anyio
DEADLINE = 30.0
HELLO = GenerationRequest(TextPrompt("hello"), max_tokens=20)
ENDLESS = GenerationRequest(TextPrompt("hello"), max_tokens=100_000, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Served:
    """A node with one simulated instance, behind a node port."""

    def __init__(self, home: Path, secret: str) -> None:
        identity = Authority(secret).issue("server") if secret else None
        self.instances = LocalInstances(Settings(home=home), "server")
        (home / "file").write_bytes(bytes(range(256)) * 1000)
        self.home = home
        context = identity.server_context() if identity else None
        commands = {"echo": self.echo, "wait": self.wait, "refuse": self.refuse}
        self.port = NodePort("server", self.instances, self, commands, "127.0.0.1", 0, context)

    def file_of(self, model_id: str, path: str) -> Path:
        if (model_id, path) != ("org/tiny", "file"):
            raise NotFoundError(f"{model_id} has no {path}.")
        return self.home / "file"

    async def echo(self, arguments: dict[str, Any]) -> Any:
        return arguments

    async def wait(self, arguments: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def refuse(self, arguments: dict[str, Any]) -> Any:
        raise InvalidRequestError("No.", param="x")


@pytest.fixture(params=["plain", "tls"])
def secret(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "plain" else "a secret of sixteen"


@pytest.fixture
async def served(tmp_path: Path, secret: str) -> AsyncIterator[Served]:
    served = Served(tmp_path, secret)
    await served.port.start()
    yield served
    await served.port.stop()
    await served.instances.stop()


@pytest.fixture
async def client(secret: str) -> AsyncIterator[NodeClient]:
    client = NodeClient(Authority(secret).issue("client").client_context() if secret else None)
    yield client
    await client.close()


def address(served: Served) -> list[str]:
    return [f"127.0.0.1:{served.port.port}"]


async def launch(served: Served, reference: str = "sim") -> str:
    instance = served.instances.launch(reference)
    await served.instances.wait_ready(instance, DEADLINE)
    return instance


async def collect(stream: Stream) -> list[Any]:
    async with asyncio.timeout(DEADLINE):
        return [event async for events in stream for event in events]


async def at_text(stream: Stream, do: Callable[[], None]) -> None:
    """Call `do` whenever text has come, to the stream's end."""
    async with asyncio.timeout(DEADLINE):
        async for events in stream:
            if any(isinstance(event, TextDelta) for event in events):
                do()


async def idle(served: Served) -> None:
    changed = asyncio.Event()
    forget = served.instances.on_change(changed.set)
    async with asyncio.timeout(DEADLINE):
        while any(status.running for status in served.instances.instances()):
            changed.clear()
            await changed.wait()
    forget()


async def test_an_answer_is_the_same_as_at_home(served: Served, client: NodeClient) -> None:
    instance = await launch(served)
    there = await collect(client.generate("server", address(served), instance, HELLO))
    here = await collect(served.instances.submit(instance, HELLO))
    assert isinstance(there[0], Accepted)
    assert isinstance(there[-1], Finished)
    assert [e.text for e in there if isinstance(e, TextDelta)] == [e.text for e in here if isinstance(e, TextDelta)]
    assert there[-1].usage == here[-1].usage


async def test_many_at_once(served: Served, client: NodeClient) -> None:
    instance = await launch(served)
    answers = await asyncio.gather(
        *(collect(client.generate("server", address(served), instance, HELLO)) for _ in range(40))
    )
    assert all(isinstance(answer[-1], Finished) for answer in answers)


async def test_closing_cancels_there(served: Served, client: NodeClient) -> None:
    instance = await launch(served, "sim:decode_tps=50")
    stream = client.generate("server", address(served), instance, ENDLESS)
    async with asyncio.timeout(DEADLINE):
        async for events in stream:
            if any(isinstance(event, TextDelta) for event in events):
                break
    assert served.instances.instances()[0].running == 1
    await stream.aclose()
    await idle(served)


async def test_refusals_keep_their_class(served: Served, client: NodeClient) -> None:
    with pytest.raises(InstanceNotReadyError, match="no instance nobody"):
        await collect(client.generate("server", address(served), "nobody", HELLO))
    with pytest.raises(InvalidRequestError, match=r"^No\.") as refused:
        await client.command("server", address(served), "refuse", {}, deadline=5)
    assert refused.value.param == "x"
    with pytest.raises(NotFoundError, match="no command 'dance'"):
        await client.command("server", address(served), "dance", {}, deadline=5)


async def test_commands_answer_or_end(served: Served, client: NodeClient) -> None:
    assert await client.command("server", address(served), "echo", {"a": [1, "b"]}, deadline=5) == {"a": [1, "b"]}
    with pytest.raises(DeadlineError, match=r"'wait' within 0.2 s"):
        await client.command("server", address(served), "wait", {}, deadline=0.2)


async def test_a_runner_that_dies_is_that_streams_error(served: Served, client: NodeClient) -> None:
    instance = await launch(served, "sim:decode_tps=50")
    stream = client.generate("server", address(served), instance, ENDLESS)
    pid = served.instances.instances()[0].pid
    assert pid is not None
    with pytest.raises(RunnerDiedError):
        await at_text(stream, lambda: os.kill(pid, signal.SIGKILL))


async def test_answers_finish_before_the_node_stops(served: Served, client: NodeClient) -> None:
    instance = await launch(served, "sim:decode_tps=20,answer_tokens=20")
    events: list[Any] = []
    async with asyncio.timeout(DEADLINE):
        stream = client.generate("server", address(served), instance, HELLO)
        events += await anext(stream)
        assert served.port.answering == 1
        finishing = asyncio.create_task(served.port.finish(DEADLINE))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="is stopping") as refused:
            await collect(client.generate("server", address(served), instance, HELLO))
        assert refused.value.retry_after
        assert await client.command("server", address(served), "echo", {"x": 1}, deadline=DEADLINE) == {"x": 1}
        events += await collect(stream)
        await finishing
    assert isinstance(events[-1], Finished)
    assert served.port.answering == 0


async def test_answers_that_take_too_long_end_in_an_error(served: Served, client: NodeClient) -> None:
    instance = await launch(served, "sim:decode_tps=20,answer_tokens=100000")
    stream = client.generate("server", address(served), instance, ENDLESS)
    await anext(stream)
    await served.port.finish(0.1)
    with pytest.raises(UnavailableError, match="is stopping"):
        await collect(stream)


@pytest.mark.parametrize("how", ["connections are cut", "membership says so"])
async def test_a_node_that_goes_is_every_streams_error(served: Served, client: NodeClient, how: str) -> None:
    instance = await launch(served, "sim:decode_tps=50")
    stream = client.generate("server", address(served), instance, ENDLESS)
    gone = {"connections are cut": lambda: cut(served), "membership says so": lambda: client.lost("server", "it left")}
    with pytest.raises(NodeLostError):
        await at_text(stream, gone[how])
    await idle(served)


def cut(served: Served) -> None:
    """As when the machine dies."""
    server = served.port._server._server
    assert server is not None
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # type: ignore[union-attr]


async def test_a_silent_node_is_lost(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.nodeport.client.SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = [f"127.0.0.1:{silent.getsockname()[1]}"]
        with pytest.raises(NodeLostError, match="cannot be reached"):
            await collect(client.generate("silent", address, "x", HELLO))
        with pytest.raises((DeadlineError, NodeLostError)):
            await client.command("silent", address, "echo", {}, deadline=0.2)


async def test_dead_addresses_are_passed_over(served: Served, client: NodeClient) -> None:
    instance = await launch(served)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        answer = await collect(client.generate("server", [dead, *address(served)], instance, HELLO))
        assert isinstance(answer[-1], Finished)
        with pytest.raises(NodeLostError, match="cannot be reached"):
            await collect(client.generate("server", [dead], instance, HELLO))
    with pytest.raises(NodeLostError, match="No address"):
        await collect(client.generate("server", [], instance, HELLO))


async def test_files_and_probes(served: Served, client: NodeClient) -> None:
    whole = (served.home / "file").read_bytes()
    for start in (0, 1000, len(whole) - 1):
        async with client.file("server", address(served), "org/tiny", "file", start=start) as pieces:
            assert b"".join([piece async for piece in pieces]) == whole[start:]
    with pytest.raises(NotFoundError):
        async with client.file("server", address(served), "org/tiny", "../secret"):
            pass
    assert await client.probe("server", address(served)[0], 1 << 20, deadline=10) > 0
    with pytest.raises(TandemError):
        await client.probe("server", address(served)[0], 1 << 40, deadline=10)


async def test_strangers_stay_out(tmp_path: Path) -> None:
    served = Served(tmp_path, "a secret of sixteen")
    await served.port.start()
    url = f"https://127.0.0.1:{served.port.port}/identity"
    other = Authority("another secret of mine").issue("stranger").client_context()
    nobody = ssl.create_default_context()
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    for context in (other, nobody):
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(url)
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.HTTPError):
            await http.get(url.replace("https", "http"))
    await served.port.stop()
    await served.instances.stop()


def test_frames_arrive_in_any_pieces() -> None:
    events: list[Any] = [Accepted(3, 0), TextDelta("héllo")]
    data = frame(events) + frame([]) + frame(events)
    for size in (1, 3, len(data)):
        parser = FrameParser()
        found = [one for start in range(0, len(data), size) for one in parser.feed(data[start : start + size])]
        assert found == [events, [], events]
        assert not parser.pending
    with pytest.raises(WireError, match="bytes came"):
        list(FrameParser().feed(HEADER.pack(MAX_FRAME_BYTES + 1)))
    with pytest.raises(WireError, match="cannot be read"):
        list(FrameParser().feed(HEADER.pack(1) + b"\xc1"))
