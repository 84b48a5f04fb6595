"""Who gets in, how far strangers get, and what they can hold up."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tandem.errors import (
    CancelledError,
    ConfigError,
    IncompatiblePeerError,
    PeerLostError,
    PeerSilentError,
    TandemError,
    WireError,
)
from tandem.kv.control import Accepted, Done, Hello, PrefillRequest, Welcome, encode_control
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.handshake import CLIENT, SERVER, decode_preamble, encode_preamble
from tandem.kv.layout import Layer, Layout, Part
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.tls import Authority
from tandem.kv.transport import Patience
from tandem.kv.wire import HEADER_BYTES, FrameType, Header, decode_header
from tests.kv.layouts import LAYOUTS, fingerprint
from tests.kv.plane.support import PROMPT, QUICK, HeldProducer, handoff, serving, staged, wrong_entries
from tests.kv.wire_examples import frame

LAYOUT = LAYOUTS["attention"]
OURS = Authority("the secret of our cluster")
THEIRS = Authority("the secret of another one")


def error_of(server_address: tuple[str, int], **options: object) -> TandemError:
    """How a hand-off from this address fails."""
    client = handoff(server_address, **options)  # type: ignore[arg-type]
    outcome = client.transfer(PROMPT, staged(Wanted(0, 50))).run()
    client.close()
    assert outcome.error is not None
    assert outcome.complete == 0
    return outcome.error


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection ended early")
        data += more
    return data


def ends(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, after whatever it still sends."""
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


# ------------------------------------------------------------------------------------------------------------ secrecy


def test_peers_with_the_secret_know_one_anothers_names() -> None:
    producer = HeldProducer()
    with serving(producer=producer, identity=OURS.issue("prefill-7")) as server:
        client = handoff(server.address, identity=OURS.issue("decode-3"))
        assert client.connect() == "prefill-7"
        transfer = client.transfer(PROMPT, staged(Wanted(0, 50)))
        thread = threading.Thread(target=transfer.run)
        thread.start()
        assert producer.wait_for_job().client == "decode-3"
        transfer.cancel()
        thread.join()
        client.close()


def test_the_authority_depends_on_the_secret_alone() -> None:
    again = Authority("the secret of our cluster")
    assert again.certificate.public_key() == OURS.certificate.public_key()
    assert THEIRS.certificate.public_key() != OURS.certificate.public_key()


def test_a_wrong_secret_ends_in_the_handshake() -> None:
    producer = HeldProducer()
    with serving(producer=producer, identity=OURS.issue("server")) as server:
        error = error_of(server.address, identity=THEIRS.issue("client"))
        assert isinstance(error, IncompatiblePeerError)
        assert "secret" in error.message
        assert not producer.jobs


def test_a_client_that_trusts_anyone_is_kept_out() -> None:
    """The server refuses by itself: a client of another authority that does not check the server's."""
    producer = HeldProducer()
    with serving(producer=producer, identity=OURS.issue("server")) as server:
        for with_certificate in (True, False):
            context = (
                THEIRS.issue("client").client_context() if with_certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            with socket.create_connection(server.address) as sock, context.wrap_socket(sock) as secure:
                secure.settimeout(10)
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    assert secure.recv(1), "the server closed without an alert"
        assert not producer.jobs


def test_no_older_tls() -> None:
    with serving(identity=OURS.issue("server")) as server:
        context = OURS.issue("client").client_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection(server.address) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(sock)


def test_plain_clients_of_a_secret_server_and_the_other_way_round() -> None:
    with serving(identity=OURS.issue("server")) as server:
        assert isinstance(error_of(server.address), PeerLostError | WireError)
    with serving(options=ServerOptions(handshake_seconds=1)) as server:
        error = error_of(server.address, identity=OURS.issue("client"))
        assert isinstance(error, IncompatiblePeerError | PeerLostError)


def test_short_secrets_are_refused() -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        Authority("hunter2")
    with pytest.raises(ConfigError, match="1 to 64"):
        OURS.issue("")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_without_a_secret_loopback_only(host: str) -> None:
    producer = HeldProducer()
    with pytest.raises(ConfigError, match="cluster secret"):
        PrefillServer(producer, LAYOUT, fingerprint(LAYOUT), options=ServerOptions(host=host))
    with pytest.raises(ConfigError, match="cluster secret"):
        handoff((host, 1))
    handoff((host, 1), options=ClientOptions(open=True)).close()


def test_an_address_that_is_taken() -> None:
    with (
        serving() as server,
        pytest.raises(ConfigError, match="cannot listen"),
        serving(options=ServerOptions(port=server.address[1])),
    ):
        pass


# ------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
def test_another_model_is_refused_by_name(secret: bool) -> None:
    """P11: architecture, heads, rope, weights: all compared, and what differs is named with both values."""
    producer = HeldProducer()
    identity = OURS.issue("node") if secret else None
    with serving(producer=producer, identity=identity) as server:
        for model, field in [
            (fingerprint(LAYOUT, rope='{"theta": 500000}'), "rope"),
            (fingerprint(LAYOUT, weights="others"), "weights"),
            (fingerprint(LAYOUT, weights="others", quantisation="4-bit"), "quantisation"),
            (fingerprint(LAYOUTS["latent"]), "heads"),
        ]:
            error = error_of(server.address, model=model, identity=identity)
            assert isinstance(error, IncompatiblePeerError)
            assert (
                f"{field}: {getattr(model, field)} here, {getattr(fingerprint(LAYOUT), field)} there" in error.message
            )
        assert not producer.jobs


def test_another_quantisation_if_the_link_says_so() -> None:
    with serving() as server:
        quantised = fingerprint(LAYOUT, weights="others", quantisation="4-bit")
        client = handoff(server.address, model=quantised, allow_quantisation=True)
        assert client.transfer(PROMPT, staged(Wanted(0, 50))).run().error is None
        client.close()
        retrained = fingerprint(LAYOUT, weights="others")
        assert "weights" in error_of(server.address, model=retrained, allow_quantisation=True).message


def test_a_server_restarted_with_other_weights() -> None:
    """A kept connection must not survive into the new server, nor the old handshake count for it."""
    with serving() as server:
        client = handoff(server.address)
        assert client.transfer(PROMPT, staged(Wanted(0, 50))).run().error is None
        address = server.address
    with serving(model=fingerprint(LAYOUT, weights="new"), options=ServerOptions(port=address[1])):
        outcome = client.transfer(PROMPT, staged(Wanted(0, 50))).run()
        assert isinstance(outcome.error, IncompatiblePeerError)
        assert "weights" in outcome.error.message
    client.close()


# ------------------------------------------------------------------------------------------------ strangers at a server


def preamble(model: Fingerprint) -> bytes:
    return encode_preamble(CLIENT, os.urandom(8), model.digest())


def hello(model: Fingerprint) -> bytes:
    return frame(Header(int(FrameType.HELLO)), encode_control(Hello(model)))


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64),
        bytes(64),
        b"TdHi\x02" + bytes(59),
        encode_preamble(SERVER, bytes(8), fingerprint(LAYOUT).digest()),
        encode_preamble(CLIENT, bytes(8), bytes(32)),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest()) + bytes(64),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest())
        + frame(Header(int(FrameType.HELLO)), b"\xc1" * 20),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest())
        + frame(Header(int(FrameType.HELLO)), encode_control(Hello(fingerprint(LAYOUTS["latent"])))),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest()) + frame(Header(int(FrameType.CANCEL)), b""),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest()) + hello(fingerprint(LAYOUT)) + bytes(64),
        encode_preamble(CLIENT, bytes(8), fingerprint(LAYOUT).digest())
        + hello(fingerprint(LAYOUT))
        + frame(Header(int(FrameType.HELLO), sequence=1), encode_control(Hello(fingerprint(LAYOUT)))),
    ],
)
def test_nonsense_ends_the_connection_and_nothing_else(opening: bytes) -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        with socket.create_connection(server.address) as sock:
            sock.sendall(opening)
            assert ends(sock)
        assert not producer.jobs
        assert handoff(server.address).connect() == ""


def test_a_stranger_is_believed_64_bytes() -> None:
    """With another model's digest nothing further is read, however much comes."""
    with serving() as server, socket.create_connection(server.address) as sock:
        sock.sendall(preamble(fingerprint(LAYOUTS["latent"])) + b"\xff" * 100_000)
        token, digest = decode_preamble(receive(sock, 64), SERVER)
        assert len(token) == 8
        assert digest == fingerprint(LAYOUT).digest()
        assert ends(sock)


def test_slow_handshakes_have_a_deadline_in_all() -> None:
    """A byte now and then does not extend it."""
    options = ServerOptions(handshake_seconds=0.5)
    with serving(options=options) as server, socket.create_connection(server.address) as sock:
        began = time.monotonic()
        for byte in preamble(fingerprint(LAYOUT)):
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            if time.monotonic() - began > 5:
                break
            threading.Event().wait(0.05)
        assert ends(sock)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
def test_open_handshakes_are_bounded(secret: bool) -> None:
    identity = OURS.issue("node") if secret else None
    options = ServerOptions(max_handshakes=3, handshake_seconds=1.0)
    with serving(identity=identity, options=options) as server:
        strangers = [socket.create_connection(server.address) for _ in range(3)]
        # Accepting is in order: once a fourth is turned away, the three are in.
        with socket.create_connection(server.address) as fourth:
            began = time.monotonic()
            assert ends(fourth)
            assert time.monotonic() - began < 0.9
        assert all(ends(stranger) for stranger in strangers)
        for stranger in strangers:
            stranger.close()
        client = handoff(server.address, identity=identity)
        assert client.transfer(PROMPT, staged(Wanted(0, 50))).run().error is None
        client.close()


def test_connections_are_bounded() -> None:
    options = ServerOptions(max_connections=2, idle_seconds=30)
    with serving(options=options) as server:
        clients = [handoff(server.address) for _ in range(3)]
        for client in clients[:2]:
            client.connect()
        assert isinstance(clients[2].transfer(PROMPT, staged(Wanted(0, 50))).run().error, PeerLostError)
        assert clients[0].transfer(PROMPT, staged(Wanted(0, 50))).run().error is None
        for client in clients:
            client.close()


def test_idle_connections_are_closed() -> None:
    options = ServerOptions(idle_seconds=0.1)
    with serving(options=options) as server, socket.create_connection(server.address) as sock:
        sock.sendall(preamble(fingerprint(LAYOUT)) + hello(fingerprint(LAYOUT)))
        receive(sock, 64)
        header = decode_header(receive(sock, HEADER_BYTES))
        assert header.type == FrameType.WELCOME
        assert ends(sock)


def test_a_client_that_takes_nothing_is_given_up() -> None:
    """Its producer is told, and stops waiting for room."""
    layout = Layout((Layer("tokens", (Part("keys", 8, 1024, "float32"), Part("values", 8, 1024, "float32"))),))
    producer = HeldProducer()
    with serving(layout, producer, options=ServerOptions(send_seconds=0.3, backlog_bytes=1 << 20)) as server:
        client = handoff(server.address, layout)
        link = client.peer.take()
        link.writer.control(PrefillRequest(PROMPT[:2000].tobytes(), 0, 2000), 9, Patience(1))
        job = producer.wait_for_job()
        entries = np.zeros((8, 2000, 1024), np.float32)

        def emit_all() -> None:
            for part in (0, 1):
                for first in range(0, 2000, 100):
                    job.emit(0, part, first, entries[:, first : first + 100])

        with pytest.raises(CancelledError):
            emit_all()
        assert producer.wait_for_cancel() is job
        link.transport.close()
        client.close()


# ------------------------------------------------------------------------------------------------- strangers as servers


Answer = Callable[[int], bytes]
"""Bytes for a request with some nonce."""


@contextmanager
def impostor(*answers: Answer, hold: bool = True, model: Fingerprint | None = None) -> Iterator[tuple[str, int]]:
    """A server that shakes hands properly, sends these bytes in answer to a request, and then nothing (`hold`) or the
    end of the stream."""
    claimed = model or fingerprint(LAYOUT)
    listener = socket.create_server(("127.0.0.1", 0))
    finished = threading.Event()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionError):
            sock.settimeout(10)
            token, _ = decode_preamble(receive(sock, 64), CLIENT)
            sock.sendall(encode_preamble(SERVER, token, claimed.digest()))
            sock.sendall(frame(Header(int(FrameType.WELCOME)), encode_control(Welcome(claimed, ("raw",), 10000, 1.0))))
            for _ in ("hello", "request"):
                header = decode_header(receive(sock, HEADER_BYTES), max_request_bytes=1 << 20)
                receive(sock, header.length)
            for answer in answers:
                sock.sendall(answer(header.nonce))
            if hold:
                finished.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        finished.set()
        thread.join()
        listener.close()


def of(kind: FrameType, payload: bytes, sequence: int, nonce: int | None = None, **fields: int) -> Answer:
    """A frame, of the request's nonce unless another is given."""
    header = Header(int(kind), sequence=sequence, **fields)
    return lambda requested: frame(header._replace(nonce=requested if nonce is None else nonce), payload)


def done(counts: tuple[int, ...], payload_bytes: int, sequence: int) -> Answer:
    return of(FrameType.DONE, encode_control(Done(counts, 50, payload_bytes)), sequence)


def accepted(codec: str = "raw", sequence: int = 1, nonce: int | None = None) -> Answer:
    return of(FrameType.ACCEPTED, encode_control(Accepted(0, 0.0, codec)), sequence, nonce)


def cut(answer: Answer, length: int) -> Answer:
    return lambda requested: answer(requested)[:length]


ROW = 3 * 16 * 4


def data(sequence: int, start: int, count: int, nonce: int | None = None, **fields: int) -> Answer:
    usual = {"dtype": 1, "head_count": 3, "token_start": start, "token_count": count} | fields
    return of(FrameType.DATA, bytes(ROW * count), sequence, nonce, **usual)


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ([done((50, 50), 0, 1)], WireError, "before the request was accepted"),
        ([accepted(), done((50, 50), 0, 2)], WireError, "not all arrived"),
        ([accepted(), data(2, 0, 50), done((50, 50), ROW * 50, 3)], WireError, "not all arrived"),
        ([accepted(), done((0, 0), 0, 2)], WireError, "finished with 0 of 50"),
        ([accepted(), done((50, 50), 1, 2)], WireError, "sent 1 bytes"),
        ([accepted(), data(2, 0, 50, nonce=1)], WireError, "stale"),
        ([accepted(nonce=7)], WireError, "stale"),
        ([accepted(), data(2, 0, 30), data(3, 29, 10)], WireError, "came twice"),
        ([accepted(), data(2, 0, 30), data(2, 30, 10)], WireError, "lost, repeated or moved"),
        ([accepted(), data(3, 0, 30)], WireError, "lost, repeated or moved"),
        ([accepted(), data(2, 40, 11)], WireError, "not asked for"),
        ([accepted(), data(2, 0, 30, layer=9)], WireError, "not asked for"),
        ([accepted(), data(2, 0, 30, dtype=2)], WireError, "dtype"),
        ([accepted(), data(2, 0, 30, head_count=2)], WireError, "bytes came for"),
        ([accepted(), accepted(sequence=2)], WireError, "twice"),
        ([accepted("int8")], WireError, "not offered"),
        ([accepted(), of(FrameType.HELLO, encode_control(Hello(fingerprint(LAYOUT))), 2)], WireError, "hello frame"),
        ([accepted(), of(FrameType.CANCEL, b"", 2)], WireError, "cancel frame"),
        ([accepted()], PeerSilentError, "Nothing came"),
        ([], PeerSilentError, "Nothing came"),
        ([accepted(), cut(data(2, 0, 30), -1)], PeerSilentError, "did nothing"),
        ([accepted(), cut(data(2, 0, 30), 40)], PeerSilentError, "did nothing"),
    ],
)
def test_a_server_that_breaks_the_protocol(answers: list[Answer], kind: type[TandemError], message: str) -> None:
    with impostor(*answers) as address:
        options = ClientOptions(silence=0.3, stall=1, handshake=5)
        client = handoff(address, options=options)
        outcome = client.transfer(PROMPT, staged(Wanted(0, 50))).run()
        client.close()
    assert isinstance(outcome.error, kind)
    assert message in outcome.error.message
    assert outcome.complete == 0


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_the_end_of_the_stream_is_never_success(length: int) -> None:
    """P7, at the frame's edges and inside."""
    with impostor(accepted(), cut(data(2, 0, 50), length), hold=False) as address:
        client = handoff(address)
        outcome = client.transfer(PROMPT, staged(Wanted(0, 50))).run()
        client.close()
    assert isinstance(outcome.error, PeerLostError)
    assert outcome.complete == 0


def test_a_server_that_lies_about_its_model() -> None:
    """It proves our digest and then says that its weights are others."""
    with impostor(model=fingerprint(LAYOUT, weights="others"), hold=False) as address:
        error = error_of(address)
    assert isinstance(error, IncompatiblePeerError)
    assert "weights" in error.message


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert isinstance(error_of(address, options=QUICK), PeerLostError)


def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = ClientOptions(handshake=0.3)
        began = time.monotonic()
        assert isinstance(error_of(listener.getsockname(), options=options), PeerSilentError)
        assert time.monotonic() - began < 3


def test_resets_are_lost_peers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset() -> None:
            sock, _ = listener.accept()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

        thread = threading.Thread(target=reset)
        thread.start()
        assert isinstance(error_of(listener.getsockname()), PeerLostError)
        thread.join()


def test_layouts_of_the_examples_are_the_ones_served() -> None:
    """The checks above would pass for a server that always fails; this one shows that the same set-up works."""
    layout: Layout = LAYOUT
    with serving(layout) as server:
        client = handoff(server.address, layout)
        staging = staged(Wanted(0, 50), layout)
        assert client.transfer(PROMPT, staging).run().error is None
        assert not wrong_entries(staging, 50)
        client.close()
