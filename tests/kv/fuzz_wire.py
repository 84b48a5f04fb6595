"""Coverage-guided fuzzing of everything that reads bytes of a peer; for hours, not for the test run.

    pip install atheris
    python -m tests.kv.fuzz_wire -max_total_time=3600 corpus/

Any exception but our own errors, and any run that takes memory beyond the bound, is a finding.
"""

from __future__ import annotations

import sys
import tracemalloc

import xxhash

from tandem.errors import HandoffError
from tandem.kv.codec import CODECS
from tandem.kv.control import CONTROL_TYPES, decode_control
from tandem.kv.handshake import CLIENT, PREAMBLE, SERVER, decode_preamble
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.wire import HEADER_BYTES, FrameType, decode_header
from tests.kv.layouts import LAYOUTS

BOUND = 4 << 20
"""Bytes that reading any input may take; the staging is there before."""

STAGING = Staging(LAYOUTS["composite"], Wanted(0, 50))
KINDS = {int(kind): control for control, kind in CONTROL_TYPES.items()}


def read_preamble(data: bytes) -> None:
    """As both sides read the other's."""
    if len(data) >= PREAMBLE.size:
        for role in (CLIENT, SERVER):
            try:
                decode_preamble(data[: PREAMBLE.size], role)
            except HandoffError:
                continue


def read_frames(data: bytes) -> None:
    """As a client reads an answer, with every checksum made right: a fuzzer would never get past that door."""
    intake = STAGING.open(7)
    intake.codec = list(CODECS)[len(data) % len(CODECS)]
    while len(data) >= HEADER_BYTES:
        fields = data[: HEADER_BYTES - 8]
        header = decode_header(fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little"))
        payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
        data = data[HEADER_BYTES + header.length :]
        if len(payload) < header.length:
            return
        if header.type in KINDS:
            decode_control(KINDS[header.type], payload)
        elif header.type in (FrameType.DATA, FrameType.STATE):
            position = 0
            for view in intake.destinations(header):
                view[:] = payload[position : position + len(view)]
                position += len(view)
            intake.commit(header)


def read_controls(data: bytes) -> None:
    """As every control frame in turn."""
    for kind in CONTROL_TYPES:
        try:
            decode_control(kind, data)
        except HandoffError:
            continue


def one_input(data: bytes) -> None:
    """What atheris calls."""
    tracemalloc.start()
    for read in (read_preamble, read_frames, read_controls):
        try:
            read(data)
        except HandoffError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if peak > BOUND:
        raise MemoryError(f"{len(data)} bytes of input took {peak} bytes of memory")


if __name__ == "__main__":
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
