"""The bus's smaller parts: options, lingering sockets, sleep, probes, bounded queues."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading

import pytest

from tandem.cluster.bus import addresses, messages
from tandem.cluster.bus.bus import Bus
from tandem.cluster.bus.config import BusOptions, free_port, options_from, zenoh_config
from tandem.cluster.bus.messages import Message, Subscription
from tandem.cluster.bus.probe import answers
from tandem.cluster.bus.sockets import release_udp_port, switch_linger_off
from tandem.config import Settings
from tandem.errors import ConfigError, PayloadTooLargeError, QueueFullError, UnavailableError

SECRET = "a secret of the test's own"


def bus_options(**values: object) -> BusOptions:
    return BusOptions(**{"node_id": "n1", "life": "l1", "port": 1, **values})  # type: ignore[arg-type]


def test_clusters_that_cannot_talk_do_not_meet() -> None:
    kinds = [bus_options(), bus_options(open=True), bus_options(secret=SECRET), bus_options(cluster_name="other")]
    assert len({kind.multicast for kind in kinds}) == len({kind.namespace for kind in kinds}) == 4
    # Those with different secrets may: their certificates keep them apart.
    assert bus_options(secret=SECRET).multicast == bus_options(secret=SECRET + "x").multicast


def test_without_a_secret_only_this_machine_is_served() -> None:
    config = zenoh_config(bus_options(), None)
    assert json.loads(config.get_json("listen/endpoints")) == ["tcp/127.0.0.1:1"]
    assert json.loads(config.get_json("scouting/multicast/interface")) == "127.0.0.1"
    bus_options(peers=("127.0.0.1:5", "[::1]:5", "localhost:5"))
    with pytest.raises(ConfigError, match="TANDEM_CLUSTER_OPEN"):
        bus_options(peers=("10.0.0.1:5",))


def test_settings_make_options() -> None:
    settings = Settings(cluster_peers="10.0.0.1:5, host:6", cluster_port=0, cluster_name="x", cluster_discovery=False)
    options = options_from(settings, "n1", "l1", SECRET)
    assert options.port > 0
    assert (options.peers, options.discovery, options.scheme) == (("10.0.0.1:5", "host:6"), False, "quic")


@pytest.mark.parametrize("values", [{"node_id": "a/b"}, {"node_id": ""}, {"life": "*"}, {"cluster_name": ""}])
def test_names_that_cannot_be_keys(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        bus_options(**values)


def test_lingering_is_switched_off_where_it_was_on() -> None:
    def linger(one: socket.socket) -> tuple[int, int]:
        on, seconds = struct.unpack("ii", one.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
        return on, seconds

    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(3)]
    try:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10))
        sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert switch_linger_off() == 1
        assert linger(sockets[0])[0] == 0
        assert linger(sockets[1]) == (1, 0), "a socket that is to abort keeps its setting"
        assert switch_linger_off() == 0
    finally:
        for one in sockets:
            one.close()


def test_a_left_listener_gives_its_port_up() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as left,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as new,
    ):
        left.bind(("127.0.0.1", 0))
        port = left.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            new.bind(("127.0.0.1", port))
        assert release_udp_port(port) == 1
        new.bind(("127.0.0.1", port))
        assert left.getsockname()[1] == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a test decides upon, looked at often."""
    current = ["10.0.0.1"]
    monkeypatch.setattr(addresses, "INTERVAL", 0.01)
    monkeypatch.setattr(addresses, "addresses", lambda: frozenset(current))
    return current


def test_new_addresses_are_noticed_and_missing_ones_are_not_news(quick: list[str]) -> None:
    told: list[str] = []
    seen = threading.Event()

    def changed(reason: str) -> None:
        told.append(reason)
        seen.set()

    watch = addresses.Watch(changed)
    watch.start()
    try:
        quick.clear()
        assert not seen.wait(0.1)
        quick.append("10.0.0.2")
        assert seen.wait(5)
        assert "10.0.0.2" in told[0]
    finally:
        watch.stop()
    assert not watch.is_alive()


def test_sleep_is_noticed(quick: list[str]) -> None:
    seen = threading.Event()
    times = iter([0.0, 1.0, 1.0, 500.0, 500.0])
    watch = addresses.Watch(lambda reason: seen.set(), clock=lambda: next(times, 500.0))
    watch.start()
    try:
        assert seen.wait(5)
    finally:
        watch.stop()


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["quic", "tcp"])
def test_a_probe_tells_a_listener_from_nothing(secret: str) -> None:
    async def check() -> None:
        scheme = "quic" if secret else "tcp"
        port = free_port("quic" if secret else "tcp")
        options = bus_options(secret=secret, port=port, discovery=False)
        host = "127.0.0.1" if not secret else next(iter(addresses.addresses()), "127.0.0.1")
        assert not await answers(f"{scheme}/{host}:{port}", deadline=0.5)
        async with Bus(options):
            assert await answers(f"{scheme}/{host}:{port}", deadline=5.0)

    asyncio.run(check())
    for nonsense in ("quic/nowhere", "tcp/:", "quic/127.0.0.1:x"):
        assert not asyncio.run(answers(nonsense, deadline=0.5))


def test_what_is_too_large_too_much_or_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        bus = Bus(bus_options(port=free_port("tcp"), discovery=False))
        async with bus:
            with pytest.raises(PayloadTooLargeError):
                bus.publish("topic", b"x" * (4 << 20) + b"x")
            with pytest.raises(ValueError, match="no topic"):
                bus.publish("a*b", b"")
            # Nothing is sent while no session is open, so that the queue fills.
            await asyncio.to_thread(bus.session._close_now)
            for _ in range(64):
                bus.publish("topic", b"x" * (1 << 20))
            with pytest.raises(QueueFullError):
                bus.publish("topic", b"x" * (2 << 20))
            await bus.session.reopen("the test closed it")
        with pytest.raises(UnavailableError):
            bus.publish("topic", b"")

    asyncio.run(check())


def test_a_slow_subscriber_loses_messages_and_not_memory() -> None:
    async def check() -> None:
        subscription = Subscription(asyncio.get_running_loop())
        for number in range(messages.MOST + 10):
            subscription.deliver(Message("topic", "n1", "l1", str(number).encode()))
        assert subscription.lost == 10
        subscription.end()
        got = [int(message.payload) async for message in subscription]
        assert got == list(range(messages.MOST))

    asyncio.run(check())
