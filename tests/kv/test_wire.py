"""Headers and control payloads: what is refused, and that nothing else happens to malformed ones."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.errors import WireError
from tandem.kv.control import CONTROL_TYPES, Done, Hello, PrefillRequest, Progress, decode_control, encode_control
from tandem.kv.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_DATA_BYTES,
    FrameType,
    Header,
    decode_header,
    encode_header,
)
from tests.kv.wire_examples import CONTROLS, examples

DATA = Header(int(FrameType.DATA), dtype=1, nonce=5, head_count=2, token_count=3, length=24, checksum=9)
STATE = Header(int(FrameType.STATE), dtype=1, nonce=5, token_count=3, length=24, checksum=9)
HELLO = Header(int(FrameType.HELLO), length=10)
FIELDS = struct.Struct("<4sBBBBBxHIQIHHIIQQ")


def sealed(fields: bytes) -> bytes:
    """Header fields with a right checksum behind them."""
    return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")


headers = st.one_of(
    st.builds(
        Header,
        type=st.just(int(FrameType.DATA)),
        flags=st.just(0),
        codec=st.integers(0, 2),
        dtype=st.integers(1, 11),
        part=st.integers(0, 63),
        layer=st.integers(0, 4095),
        nonce=st.integers(0, 2**64 - 1),
        sequence=st.integers(0, 2**32 - 1),
        head_start=st.integers(0, 2**16 - 1),
        head_count=st.integers(1, 2**16 - 1),
        token_start=st.integers(0, 2**23),
        token_count=st.integers(1, 2**22),
        length=st.integers(1, MAX_DATA_BYTES),
        checksum=st.integers(0, 2**64 - 1),
    ),
    st.builds(
        Header,
        type=st.sampled_from([int(FrameType.HELLO), int(FrameType.DONE), int(FrameType.ERROR)]),
        flags=st.just(0),
        codec=st.just(0),
        dtype=st.just(0),
        part=st.just(0),
        layer=st.just(0),
        nonce=st.integers(0, 2**64 - 1),
        sequence=st.integers(0, 2**32 - 1),
        head_start=st.just(0),
        head_count=st.just(0),
        token_start=st.just(0),
        token_count=st.just(0),
        length=st.integers(1, MAX_CONTROL_BYTES),
        checksum=st.integers(0, 2**64 - 1),
    ),
)


@given(headers)
def test_headers_survive(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_survives(header: Header, bit: int) -> None:
    data = bytearray(encode_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode_header(data)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(data)


@given(st.binary(min_size=50, max_size=50))
def test_well_sealed_nonsense_is_judged_by_its_fields(data: bytes) -> None:
    """With a right magic, version and checksum: a header within all bounds, or a typed refusal."""
    try:
        header = decode_header(sealed(b"TdKV\x01" + data + b"\0"))
    except WireError:
        return
    limit = MAX_DATA_BYTES if header.type in (FrameType.DATA, FrameType.STATE) else MAX_CONTROL_BYTES
    assert header.length <= limit
    assert encode_header(header) == sealed(b"TdKV\x01" + data + b"\0")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (DATA._replace(type=99), "type 99"),
        (DATA._replace(type=0), "type 0"),
        (DATA._replace(flags=1), "Flags 0x1"),
        (DATA._replace(codec=77), "Codec 77"),
        (DATA._replace(dtype=0), "Dtype 0"),
        (DATA._replace(dtype=200), "Dtype 200"),
        (DATA._replace(layer=4096), "cannot exist"),
        (DATA._replace(layer=2**32 - 1), "cannot exist"),
        (DATA._replace(part=64), "cannot exist"),
        (DATA._replace(token_count=0), "cannot exist"),
        (DATA._replace(token_start=2**32 - 1, token_count=2**32 - 1), "cannot exist"),
        (DATA._replace(token_start=2**24 - 3), "cannot exist"),
        (DATA._replace(head_count=0), "no heads"),
        (DATA._replace(length=MAX_DATA_BYTES + 1), "over the limit"),
        (DATA._replace(length=2**64 - 1), "over the limit"),
        (DATA._replace(length=2**32), "over the limit"),
        (DATA._replace(length=0), "no payload"),
        (STATE._replace(codec=1), "which only data has"),
        (STATE._replace(head_count=1), "which only data has"),
        (STATE._replace(token_start=1), "which only data has"),
        (HELLO._replace(length=MAX_CONTROL_BYTES + 1), "over the limit"),
        (HELLO._replace(length=0), "no payload"),
        (HELLO._replace(layer=1), "names a layer"),
        (HELLO._replace(dtype=1), "Dtype 1"),
        (Header(int(FrameType.CANCEL), length=1), "over the limit of 0"),
        (Header(int(FrameType.PREFILL), length=MAX_CONTROL_BYTES + 1), "over the limit"),
    ],
)
def test_refusals_name_what_is_wrong(header: Header, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_header(encode_header(header))


def test_the_limit_of_a_request_is_the_servers() -> None:
    header = Header(int(FrameType.PREFILL), length=1 << 20)
    assert decode_header(encode_header(header), max_request_bytes=1 << 20) == header


def test_other_versions_are_named() -> None:
    data = bytearray(encode_header(DATA))
    data[4] = 2
    with pytest.raises(WireError, match="version 2, we speak 1"):
        decode_header(data)


def test_other_protocols_are_named() -> None:
    with pytest.raises(WireError, match="GET "):
        decode_header(b"GET / HTTP/1.1\r\n".ljust(64))


def test_the_reserved_byte_is_checked() -> None:
    fields = bytearray(encode_header(DATA)[:56])
    fields[9] = 1
    with pytest.raises(WireError, match="reserved"):
        decode_header(sealed(bytes(fields)))


@pytest.mark.parametrize("length", [0, 1, 63, 65])
def test_a_header_has_64_bytes(length: int) -> None:
    with pytest.raises(WireError, match="64 bytes"):
        decode_header(bytes(length))


# ---------------------------------------------------------------------------------------------------- control frames


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_control_frames_survive(name: str) -> None:
    message = CONTROLS[name]
    assert decode_control(type(message), encode_control(message)) == message


def test_unknown_keys_are_ignored() -> None:
    later = msgspec.msgpack.encode({"processed": 1, "total": 2, "of_a_later_version": [1, {"x": None}]})
    assert decode_control(Progress, later) == Progress(1, 2)


kinds = st.sampled_from(sorted(CONTROL_TYPES, key=lambda kind: kind.__name__))
nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(kinds, st.binary(max_size=200))
@example(Done, b"\x81\xa6counts\xdd\xff\xff\xff\xff")
@example(Hello, b"\x81\xabfingerprint\xdf\xff\xff\xff\xff")
@example(PrefillRequest, b"\x81\xa6tokens\xc6\xff\xff\xff\xff")
@example(Progress, b"\xdf\xff\xff\xff\xff")
@example(Progress, b"\x81\xa1x" + b"\x91" * 60000)
@example(Progress, b"\x81\xa1x\xdb\xff\xff\xff\xff")
def test_random_payloads_are_refused_without_taking_memory(kind: type[Any], payload: bytes) -> None:
    tracemalloc.start()
    try:
        decode_control(kind, payload)
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@given(kinds, st.data())
def test_wrong_types_are_refused_or_fit(kind: type[Any], data: st.DataObject) -> None:
    """Any msgpack map under the right keys: a message that encodes again, or a typed refusal."""
    keys = st.sampled_from(kind.__struct_fields__)
    payload = msgspec.msgpack.encode(data.draw(st.dictionaries(keys, nested, max_size=6)))
    try:
        message = decode_control(kind, payload)
    except WireError:
        return
    assert encode_control(message)


@given(kinds, st.data())
def test_damaged_messages_are_refused_or_fit(kind: type[Any], data: st.DataObject) -> None:
    whole = next(encode_control(message) for message in CONTROLS.values() if type(message) is kind)
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:position] + data.draw(st.binary(max_size=6)) + whole[position + 1 :]
    try:
        message = decode_control(kind, damaged)
    except WireError:
        return
    assert encode_control(message)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_times_are_numbers(bad: float) -> None:
    payload = msgspec.msgpack.encode({"counts": [1], "end": 1, "payload_bytes": 1, "queued": bad})
    with pytest.raises(WireError, match="malformed"):
        decode_control(Done, payload)


def test_examples_are_whole_frames() -> None:
    for name, data in examples().items():
        if name in CONTROLS:
            header = decode_header(data[:HEADER_BYTES])
            assert decode_control(type(CONTROLS[name]), data[HEADER_BYTES:]) == CONTROLS[name]
            assert header.length == len(data) - HEADER_BYTES
