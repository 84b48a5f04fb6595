"""One example of everything that goes over the wire, as objects. Their bytes are in `docs/wire.md`."""

from __future__ import annotations

import numpy as np

from tandem.kv.codec import RAW
from tandem.kv.control import (
    Accepted,
    Busy,
    Control,
    Done,
    Hello,
    PrefillRequest,
    Problem,
    Progress,
    Welcome,
    encode_control,
)
from tandem.kv.conversion import with_dtypes
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.handshake import CLIENT, SERVER, encode_preamble
from tandem.kv.job import Outgoing
from tandem.kv.layout import Layer, Layout, Part, StateArray
from tandem.kv.outgoing import frames_of
from tandem.kv.wire import CodecId, FrameType, Header, checksum, encode_header

NONCE = 0x0123456789ABCDEF

LAYOUT = Layout(
    (
        Layer("tokens", (Part("keys", 2, 2, "float16"), Part("values", 2, 2, "float16"))),
        Layer("window", (Part("keys", 2, 2, "float16"),), window=4, sinks=1),
        Layer("state", states=(StateArray("ssm", (1, 2), "float32"),)),
    )
)
FINGERPRINT = Fingerprint.of(
    LAYOUT, architecture="llama", tokenizer="ab12", rope='{"theta":10000.0}', quantisation="none", weights="cd34"
)

CONTROLS: dict[str, Control] = {
    "hello": Hello(FINGERPRINT, "decode-1"),
    "welcome": Welcome(FINGERPRINT, ("raw", "int8"), 4096, 1.0, "prefill-1"),
    "prefill": PrefillRequest((1).to_bytes(4, "little") + (70000).to_bytes(4, "little"), 0, 2, codecs=("int8", "raw")),
    "accepted": Accepted(0, 0.0, "raw"),
    "busy": Busy(2.5),
    "progress": Progress(1, 2, computing=True),
    "done": Done((2, 2, 1), 2, 56),
    "error": Problem("engine_error", "out of memory"),
}
CONTROL_FRAMES = {
    "hello": FrameType.HELLO,
    "welcome": FrameType.WELCOME,
    "prefill": FrameType.PREFILL,
    "accepted": FrameType.ACCEPTED,
    "busy": FrameType.BUSY,
    "progress": FrameType.PROGRESS,
    "done": FrameType.DONE,
    "error": FrameType.ERROR,
}

WIDE_LAYOUT = with_dtypes(LAYOUT, ["float32"] * 3 + ["bfloat16"])
"""The same model as a server may keep it whose engine computes in other types."""
WIDE = np.array([[[1.0, -2.5], [65504.0, 1e9]], [[0.1, 1 / 3], [2049.0, 2051.0]]], np.float32)
WIDE_STATE = np.array([[0x3F80, 0x4000]], np.uint16)

RAW_PAYLOAD = bytes(range(16))
"""Keys of two heads, two tokens and two dimensions in float16."""
STATE_PAYLOAD = bytes.fromhex("0000803f00000040")
"""1.0 and 2.0 in float32."""


def frame(header: Header, payload: bytes) -> bytes:
    """A whole frame."""
    return encode_header(header._replace(length=len(payload), checksum=checksum((payload,)))) + payload


def examples() -> dict[str, bytes]:
    """The bytes of every example, by its name in the document."""
    found = {
        "preamble client": encode_preamble(CLIENT, bytes(range(8)), FINGERPRINT.digest()),
        "preamble server": encode_preamble(SERVER, bytes(range(8)), FINGERPRINT.digest()),
        "layout": LAYOUT.encode(),
    }
    for number, (name, message) in enumerate(CONTROLS.items()):
        nonce = 0 if name in ("hello", "welcome") else NONCE
        header = Header(int(CONTROL_FRAMES[name]), nonce=nonce, sequence=number)
        found[name] = frame(header, encode_control(message))
    found["keep-alive"] = frame(Header(int(FrameType.KEEP_ALIVE), nonce=NONCE, sequence=8), b"")
    found["cancel"] = frame(Header(int(FrameType.CANCEL), nonce=NONCE, sequence=9), b"")
    data = Header(
        int(FrameType.DATA), codec=int(CodecId.RAW), dtype=2, nonce=NONCE, sequence=10, head_count=2, token_count=2
    )
    found["data"] = frame(data, RAW_PAYLOAD)
    state = Header(int(FrameType.STATE), dtype=1, layer=2, nonce=NONCE, sequence=11, token_count=2)
    found["state"] = frame(state, STATE_PAYLOAD)
    for name, item, sequence in (
        ("data converted", Outgoing(0, 0, 0, 0, WIDE, False), 10),
        ("state converted", Outgoing(2, 0, 0, 2, WIDE_STATE, True), 11),
    ):
        (only,) = frames_of(item, WIDE_LAYOUT, NONCE, RAW, 1 << 20, wanted=LAYOUT)
        found[name] = frame(only.header._replace(sequence=sequence), b"".join(only.views))
    return found
