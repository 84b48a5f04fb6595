"""`docs/wire.md` says what the code does: examples, numbers, limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.kv.control import CONTROL_TYPES
from tandem.kv.dtypes import DTYPES
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import MAX_LAYERS, MAX_PARTS, MAX_TOKENS, Layout
from tandem.kv.plan import MAX_CHECKPOINTS
from tandem.kv.wire import HEADER_BYTES, MAX_CONTROL_BYTES, MAX_DATA_BYTES, CodecId, FrameType, decode_header
from tests.kv.wire_examples import LAYOUT, examples

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
DOCUMENTED = dict(re.findall(r"^([a-z-]+(?: [a-z]+)?) = ([0-9a-f]+)$", TEXT, re.MULTILINE))


def test_every_example_is_documented() -> None:
    assert set(DOCUMENTED) == set(examples())


@pytest.mark.parametrize("name", sorted(examples()))
def test_example_bytes(name: str) -> None:
    assert DOCUMENTED[name] == examples()[name].hex()


@pytest.mark.parametrize("name", sorted(set(examples()) - {"layout", "preamble client", "preamble server"}))
def test_documented_headers_decode(name: str) -> None:
    data = bytes.fromhex(DOCUMENTED[name])
    header = decode_header(data[:HEADER_BYTES])
    assert header.name == name.removesuffix(" converted").replace("-", "_")
    assert HEADER_BYTES + header.length == len(data)


def test_the_layout_decodes() -> None:
    assert Layout.decode(bytes.fromhex(DOCUMENTED["layout"])) == LAYOUT


def test_frame_types_and_their_limits() -> None:
    for kind in FrameType:
        limit = {
            FrameType.PREFILL: "4 * max_tokens + 4096 (max_tokens: see welcome)",
            FrameType.KEEP_ALIVE: "0",
            FrameType.CANCEL: "0",
            FrameType.DATA: str(MAX_DATA_BYTES),
            FrameType.STATE: str(MAX_DATA_BYTES),
        }.get(kind, str(MAX_CONTROL_BYTES))
        assert re.search(
            rf"^\| {kind.name.lower()} \| {kind.value} \| .* \| {re.escape(limit)} \|$", TEXT, re.MULTILINE
        )


def test_dtypes_and_codecs() -> None:
    for name, dtype in DTYPES.items():
        assert re.search(rf"^\| {name} \| {dtype.code} \|", TEXT, re.MULTILINE)
    for codec in CodecId:
        assert re.search(rf"\| {codec.name.lower()} \| {codec.value} \|$", TEXT, re.MULTILINE)


def test_every_field_of_a_control_frame_is_documented() -> None:
    for kind, frame_type in CONTROL_TYPES.items():
        paragraph = re.search(
            rf"^\*\*{frame_type.name.lower()}\*\*:(.*?)(?=^\*\*|^```)", TEXT, re.MULTILINE | re.DOTALL
        )
        assert paragraph, frame_type
        fields = kind.__struct_fields__
        required = len(fields) - len(kind.__struct_defaults__)
        for number, field in enumerate(fields):
            mark = r"`\*" if number >= required else "`(?!\\*)"
            assert re.search(f"`{field}{mark}", paragraph[1]), (frame_type, field)


def test_every_field_of_a_fingerprint_is_documented() -> None:
    rows = re.findall(r"^\| `([a-z]+)` \|", TEXT, re.MULTILINE)
    assert tuple(rows) == Fingerprint.__struct_fields__


def test_bounds() -> None:
    assert f"a layer from {MAX_LAYERS}, a part from {MAX_PARTS}, or a token end from 2^24" in TEXT.replace("\n", " ")
    assert MAX_TOKENS == 2**24
    assert f"There may be {MAX_CHECKPOINTS} checkpoints" in TEXT
