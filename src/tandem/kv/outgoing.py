"""Turns entries into frames of a size that suits sockets and caches, encoded if that was agreed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tandem.kv.codec import CODECS, RAW
from tandem.kv.conversion import convert
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.job import Outgoing
from tandem.kv.layout import Layout
from tandem.kv.wire import CodecId, FrameType, Header, as_bytes


class Frame(NamedTuple):
    """A frame to be sent: its header, but for sequence, length and checksum, and its payload."""

    header: Header
    views: list[memoryview]


def frames_of(
    item: Outgoing, layout: Layout, nonce: int, codec_name: str, frame_bytes: int, *, wanted: Layout | None = None
) -> Iterator[Frame]:
    """The frames that carry an item, each of about `frame_bytes` before encoding. Arrays are viewed, not copied,
    unless the rows of one token are not contiguous, or the client's element type is another.

    Args:
        layout: of the item.
        wanted: the client's, which differs in float types at most.
    """
    wanted = wanted or layout
    if item.is_state:
        source, state = layout.layers[item.layer].states[item.part], wanted.layers[item.layer].states[item.part]
        header = Header(
            int(FrameType.STATE),
            dtype=DTYPES[state.dtype].code,
            part=item.part,
            layer=item.layer,
            nonce=nonce,
            token_count=item.token,
        )
        yield Frame(header, [as_bytes(np.ascontiguousarray(convert(item.array, source.dtype, state.dtype)))])
        return
    own, part = layout.layers[item.layer].parts[item.part], wanted.layers[item.layer].parts[item.part]
    heads, tokens = item.array.shape[:2]
    step = max(1, frame_bytes // (heads * part.row_bytes))
    codec = CODECS[codec_name] if codec_name != RAW else None
    if codec is not None and not codec.applies_to(part):
        codec = None
    for first in range(0, tokens, step):
        entries = convert(item.array[:, first : first + step], own.dtype, part.dtype)
        header = Header(
            int(FrameType.DATA),
            dtype=DTYPES[part.dtype].code,
            part=item.part,
            layer=item.layer,
            nonce=nonce,
            head_start=item.head,
            head_count=heads,
            token_start=item.token + first,
            token_count=entries.shape[1],
        )
        encoded = codec.encode(entries, part.dtype) if codec is not None else None
        if codec is None or encoded is None:
            yield Frame(header._replace(codec=int(CodecId.RAW)), _views(entries))
        else:
            yield Frame(header._replace(codec=int(codec.id)), [as_bytes(array) for array in encoded])


def _views(entries: Array) -> list[memoryview]:
    """The bytes of `[heads, tokens, dim]` entries: one buffer a head, or one for all where they touch."""
    if entries.flags.c_contiguous:
        return [as_bytes(entries)]
    rows_touch = entries.strides[2] == entries.itemsize and entries.strides[1] == entries.shape[2] * entries.itemsize
    if not rows_touch:
        return [as_bytes(np.ascontiguousarray(entries))]
    return [as_bytes(head) for head in entries]
