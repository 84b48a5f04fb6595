"""Files of checksummed records: what a power cut left half-written is seen as such.

```
file   = magic "TNDMINTS" · version u16 · generation u64 · xxh3_64 of these 18 bytes · record*
record = length u32 · xxh3_64 of length and payload, seeded with the generation · payload
```

Numbers are big-endian. The seed tells a record from one of an older file whose blocks the file system used again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tandem.errors import NewerFormatError

VERSION = 1
MAGIC = b"TNDMINTS"
LARGEST_RECORD = 64 * 2**20
_HEADER = struct.Struct(">8sHQQ")
_RECORD = struct.Struct(">IQ")


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds.

    Attributes:
        payloads: of every sound record, in order.
        damage: what is wrong with the rest; None if nothing is.
    """

    payloads: tuple[bytes, ...]
    damage: str | None


def header(generation: int) -> bytes:
    """How a file begins."""
    return _HEADER.pack(MAGIC, VERSION, generation, _header_sum(VERSION, generation))


def record(payload: bytes, generation: int) -> bytes:
    """One record."""
    length = len(payload)
    return _RECORD.pack(length, _sum(payload, generation)) + payload


def scan(data: bytes, generation: int, name: str) -> Scan:
    """Every sound record of a file. After an unsound one the search goes on where its length says.

    Args:
        name: of the file, for messages.

    Raises:
        NewerFormatError: a later version of Tandem wrote it.
    """
    if len(data) < _HEADER.size:
        return Scan((), f"{name} ends within its first {_HEADER.size} bytes")
    magic, version, found, checksum = _HEADER.unpack_from(data)
    damage = []
    if magic != MAGIC or checksum != _header_sum(version, found):
        damage.append("it does not begin as it should")
    elif version > VERSION:
        raise NewerFormatError(
            f"{name} was written by a newer Tandem (format {version}; this one reads {VERSION}). Install that version "
            "again, or move the folder away to begin without what it holds: other nodes send it again."
        )
    payloads, unsound, offset = [], 0, _HEADER.size
    while offset + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, offset)
        end = offset + _RECORD.size + length
        if length > LARGEST_RECORD or end > len(data):
            break
        payload = data[offset + _RECORD.size : end]
        if checksum == _sum(payload, generation):
            payloads.append(payload)
        else:
            unsound += 1
        offset = end
    if unsound:
        damage.append(f"{unsound} records fail their checksum")
    if offset < len(data):
        damage.append(f"{len(data) - offset} bytes at its end are no record")
    return Scan(tuple(payloads), f"{name}: {', '.join(damage)}" if damage else None)


def _header_sum(version: int, generation: int) -> int:
    return xxhash.xxh3_64_intdigest(_HEADER.pack(MAGIC, version, generation, 0)[:18])


def _sum(payload: bytes, generation: int) -> int:
    digest = xxhash.xxh3_64(seed=generation)
    digest.update(len(payload).to_bytes(4, "big"))
    digest.update(payload)
    return digest.intdigest()
