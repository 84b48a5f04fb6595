"""What two copies of the intent map say to one another, as msgpack.

The one that begins sends its digest. If the other's is another one, it answers with the digests of its buckets. Then
the first sends all it has in the buckets that differ, and gets what the other has there: neither sends anything of the
buckets that are equal. Each message is bounded, so long differences take several rounds.

Entries are packed one by one: a version that cannot read one kind of them still takes the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from tandem.cluster.intents import BUCKETS, DIGEST_BYTES, IntentMap, decode_entry, encode_entry
from tandem.errors import WireError
from tandem.types.intents import Entry

MESSAGE_BYTES = 256 * 1024
"""Entries of one message, in bytes; a message with a single larger bucket takes more."""
LARGEST_MESSAGE = 64 * 2**20

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Bucket: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]


class Changes(msgspec.Struct, frozen=True, tag="changes"):
    """Entries that just changed, to everybody. Unanswered."""

    entries: tuple[msgspec.Raw, ...]


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Is your map the same as mine? Answered by `Same` or `Differs`."""

    digest: Digest


class Same(msgspec.Struct, frozen=True, tag="same"):
    """The digests are equal."""


class Differs(msgspec.Struct, frozen=True, tag="differs"):
    """They are not; here are those of my buckets."""

    buckets: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


class Trade(msgspec.Struct, frozen=True, tag="trade"):
    """All that I have in these buckets, for what you have there. Answered by `Traded`."""

    buckets: Annotated[tuple[Bucket, ...], msgspec.Meta(min_length=1, max_length=BUCKETS)]
    entries: tuple[msgspec.Raw, ...]


class Traded(msgspec.Struct, frozen=True, tag="traded"):
    """What I have in `buckets`, at least one of those asked for, and did not just get from you."""

    buckets: Annotated[tuple[Bucket, ...], msgspec.Meta(min_length=1, max_length=BUCKETS)]
    entries: tuple[msgspec.Raw, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The question could not be read."""

    reason: str


Message: TypeAlias = Changes | Compare | Same | Differs | Trade | Traded | Refused

_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`.

    Raises:
        WireError: it is none.
    """
    if len(data) > LARGEST_MESSAGE:
        raise WireError(f"A message about intents has {len(data)} bytes; {LARGEST_MESSAGE} are allowed.")
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"A message about intents cannot be read: {error}. The nodes may run different versions of Tandem."
        ) from error


def pack(entries: Iterable[Entry]) -> tuple[msgspec.Raw, ...]:
    """Entries for a message."""
    return tuple(msgspec.Raw(encode_entry(entry)) for entry in entries)


def unpack(packed: Iterable[msgspec.Raw]) -> tuple[list[Entry], int]:
    """Entries of a message, and how many could not be read."""
    entries, unreadable = [], 0
    for raw in packed:
        try:
            entries.append(decode_entry(raw))
        except (msgspec.MsgspecError, RecursionError):
            unreadable += 1
    return entries, unreadable


def messages_of(entries: Iterable[Entry]) -> list[Changes]:
    """Entries as messages of `MESSAGE_BYTES` at most."""
    messages: list[Changes] = []
    held: list[msgspec.Raw] = []
    size = 0
    for raw in pack(entries):
        length = len(memoryview(raw))
        if held and size + length > MESSAGE_BYTES:
            messages.append(Changes(tuple(held)))
            held, size = [], 0
        held.append(raw)
        size += length
    return [*messages, Changes(tuple(held))] if held else messages


def fill(held: IntentMap, buckets: Iterable[int], without: frozenset[bytes] = frozenset()) -> Trade:
    """As many of `buckets` as fit a message, at least one, and their entries.

    Args:
        without: packed entries that the other side has.
    """
    taken: list[int] = []
    entries: list[msgspec.Raw] = []
    size = 0
    for index in buckets:
        packed = [raw for raw in pack(held.bucket(index)) if bytes(raw) not in without]
        length = sum(len(memoryview(raw)) for raw in packed)
        if taken and size + length > MESSAGE_BYTES:
            break
        taken.append(index)
        entries += packed
        size += length
    return Trade(tuple(taken), tuple(entries))
