"""The first exchange on a connection: who the other is, and whether entries of its model may enter our cache.

Each side first sends a 64-byte preamble with a digest of its model's fingerprint and believes nothing else before it
has compared the other's with its own. Then `hello` and `welcome` carry the whole fingerprints, so that a mismatch can
be named field by field. Secrecy is TLS's business; the digest keeps honest peers with another model apart.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from tandem.errors import IncompatiblePeerError, PeerRefusedError, WireError
from tandem.kv.control import Hello, Problem, Welcome
from tandem.kv.fingerprint import PROTOCOL_VERSION, Fingerprint
from tandem.kv.frames import FrameReader, FrameWriter
from tandem.kv.transport import Patience, Transport
from tandem.kv.wire import FrameType, Header

PREAMBLE = struct.Struct("<4sBB2x8s16x32s")
PREAMBLE_MAGIC = b"TdHi"
CLIENT, SERVER = 1, 2
assert PREAMBLE.size == 64


def encode_preamble(role: int, token: bytes, digest: bytes) -> bytes:
    """The 64 bytes that a connection begins with.

    Args:
        role: `CLIENT` or `SERVER`.
        token: 8 random bytes of the client; the server repeats them.
        digest: `Fingerprint.digest()`.
    """
    return PREAMBLE.pack(PREAMBLE_MAGIC, PROTOCOL_VERSION, role, token, digest)


def decode_preamble(data: bytes | bytearray | memoryview, role: int) -> tuple[bytes, bytes]:
    """(token, digest) of the other side's preamble.

    Raises:
        WireError: it is none, or of another version or role, or its unused bytes are not 0.
    """
    magic, version, claimed, token, digest = PREAMBLE.unpack(data)
    if magic != PREAMBLE_MAGIC:
        raise WireError(f"{magic!r} begins no connection of ours. Point the link at the peer's KV port.")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"The peer speaks wire version {version}, we speak {PROTOCOL_VERSION}. Install the same Tandem on both."
        )
    if claimed != role or bytes(data) != PREAMBLE.pack(magic, version, claimed, token, digest):
        raise WireError("The preamble is not one of the other side. Point the link at the peer's KV port.")
    return token, digest


def greet_server(
    transport: Transport, reader: FrameReader, writer: FrameWriter, hello: Hello, patience: Patience
) -> Welcome:
    """The client's side. Returns what the server says of itself.

    Raises:
        IncompatiblePeerError: the models differ; the message names the fields.
        PeerRefusedError: the server answered with an error.
        WireError, PeerLostError, PeerSilentError, CancelledError: no handshake came about.
    """
    token, ours = secrets.token_bytes(8), hello.fingerprint.digest()
    transport.send((encode_preamble(CLIENT, token, ours),), patience)
    repeated, theirs = decode_preamble(_receive_preamble(transport, patience), SERVER)
    if not hmac.compare_digest(repeated, token):
        raise WireError("The server answered somebody else's preamble. Check what sits between the peers.")
    if hmac.compare_digest(theirs, ours):
        writer.control(hello, 0, patience)
    # A server of another model sends its fingerprint without hearing more of us.
    header = reader.header(patience)
    if header.type == FrameType.ERROR:
        raise refusal(reader.control(header, Problem, patience), hello)
    welcome = reader.control(header, Welcome, patience)
    check_compatible(hello.fingerprint, welcome.fingerprint, allow_quantisation=hello.allow_quantisation)
    if not hmac.compare_digest(theirs, welcome.fingerprint.digest()):
        raise WireError("The server's fingerprint is not the one that it proved. Do not use this peer.")
    return welcome


def greet_client(
    transport: Transport, reader: FrameReader, writer: FrameWriter, welcome: Welcome, patience: Patience
) -> Hello:
    """The server's side. Returns what the client says of itself.

    Raises:
        IncompatiblePeerError: the models differ; the client was told.
        WireError, PeerLostError, PeerSilentError, CancelledError: no handshake came about.
    """
    token, theirs = decode_preamble(_receive_preamble(transport, patience), CLIENT)
    ours = welcome.fingerprint.digest()
    transport.send((encode_preamble(SERVER, token, ours),), patience)
    try:
        if not hmac.compare_digest(theirs, ours):
            raise IncompatiblePeerError("The client's model is another one: its fingerprint has another digest.")
        hello = reader.control(reader.header(patience), Hello, patience)
        if not hmac.compare_digest(theirs, hello.fingerprint.digest()):
            raise WireError("The client's fingerprint is not the one that it proved.")
        check_compatible(welcome.fingerprint, hello.fingerprint, allow_quantisation=hello.allow_quantisation)
    except IncompatiblePeerError as error:
        writer.control(Problem(error.code, error.message[:4096], fingerprint=welcome.fingerprint), 0, patience)
        raise
    writer.control(welcome, 0, patience)
    return hello


def check_compatible(ours: Fingerprint, theirs: Fingerprint, *, allow_quantisation: bool) -> None:
    """Refuse another model.

    Raises:
        IncompatiblePeerError: names every field that differs, with both values.
    """
    differences = ours.differences(theirs, allow_quantisation=allow_quantisation)
    if differences:
        named = "; ".join(str(one)[:400] for one in differences[:8])
        raise IncompatiblePeerError(
            f"The models on the two sides differ in {named}. Load the same model on both, or link others."
        )


def refusal(problem: Problem, hello: Hello) -> IncompatiblePeerError | PeerRefusedError:
    """The exception for a handshake that the server ended with an error."""
    if problem.code != IncompatiblePeerError.code:
        return PeerRefusedError(f"The peer refused the connection: {problem.message}", retry_after=problem.retry_after)
    if problem.fingerprint is not None:
        try:
            check_compatible(hello.fingerprint, problem.fingerprint, allow_quantisation=hello.allow_quantisation)
        except IncompatiblePeerError as error:
            return error
    return IncompatiblePeerError(problem.message)


def expect_nonce(header: Header, nonce: int) -> None:
    """Refuse a frame of another request.

    Raises:
        WireError: its nonce is another one.
    """
    if header.nonce != nonce:
        raise WireError(
            f"A {header.name} frame of request {header.nonce:016x} came in answer to {nonce:016x}: it is stale, or "
            "another's. Check what sits between the peers."
        )


def _receive_preamble(transport: Transport, patience: Patience) -> bytearray:
    data = bytearray(PREAMBLE.size)
    transport.receive((memoryview(data),), patience)
    return data
