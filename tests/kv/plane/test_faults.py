"""Faults on the way between real sockets: no wrong entry is ever called complete, nothing hangs, nothing is left.

`TANDEM_KV_FAULTS` sets how many are drawn (default 200; 10000 takes some minutes), `TANDEM_KV_FAULT_SEED` which.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tandem.kv.client import Handoff
from tandem.kv.layout import Layout
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticProducer
from tandem.kv.tls import Authority, Identity
from tests.kv.layouts import LAYOUTS, fingerprint
from tests.kv.plane.proxy import Proxy, draw_fault
from tests.kv.plane.support import PROMPT, handoff, wrong_entries

DRAWS = int(os.environ.get("TANDEM_KV_FAULTS", "200"))
SEED = int(os.environ.get("TANDEM_KV_FAULT_SEED", "0"))
NAMES = ("attention", "mixed dtypes", "window", "hybrid", "composite")
AUTHORITY = Authority("a secret for faulty links")
SILENCE = 0.3
LIMIT = 15.0
"""No draw may take longer, in seconds. The deadlines add up to 3; the rest is for a busy machine."""


class Place(NamedTuple):
    """A server, and what a clean conversation with it looks like."""

    layout: Layout
    server: PrefillServer
    identity: Identity | None
    direct: Handoff
    recordings: dict[Wanted, tuple[list[bytes], list[bytes]]]


def client_of(place: Place, address: tuple[str, int], silence: float) -> Handoff:
    options = ClientOptions(connect=2, handshake=max(1.0, silence), silence=silence, stall=2, queue=2, drain=0.2)
    return handoff(address, place.layout, identity=place.identity, options=options)


def through(place: Place, proxy: Proxy, staging: Staging, silence: float) -> str:
    """A hand-off through a proxy; what came of it. Its entries are right, as far as they count as complete."""
    client = client_of(place, proxy.address, silence)
    outcome = client.transfer(PROMPT, staging).run()
    client.close()
    proxy.close()
    end = staging.plan.wanted.end
    assert outcome.complete == staging.complete_through()
    assert outcome.error is not None or outcome.complete == end
    wrong = wrong_entries(staging, outcome.complete)
    assert not wrong, wrong
    return type(outcome.error).__name__ if outcome.error else "complete"


def recording(place: Place, wanted: Wanted) -> tuple[list[bytes], list[bytes]]:
    """What goes by in both directions when nothing is wrong."""
    if wanted not in place.recordings:
        clean = Proxy(place.server.address, None, tls=place.identity is not None, recorded=([], []))
        assert through(place, clean, Staging(place.layout, wanted), 10) == "complete"
        place.recordings[wanted] = clean.units
    return place.recordings[wanted]


def one_draw(number: int, places: list[Place]) -> tuple[str, str]:
    draw = random.Random(f"{SEED}/{number}")
    place = draw.choice(places)
    start = draw.choice([0, 0, 37])
    wanted = Wanted(start, start + draw.choice([1, 2, 3, 40, 64, 65, 130]), checkpoint=draw.choice([0, 20]))
    recorded = recording(place, wanted)
    fault = draw_fault(draw, (len(recorded[0]), len(recorded[1])))
    proxy = Proxy(place.server.address, fault, tls=place.identity is not None, recorded=recorded)
    staging = Staging(place.layout, wanted)
    began = time.monotonic()
    result = through(place, proxy, staging, SILENCE)
    elapsed = time.monotonic() - began
    assert elapsed < LIMIT, (fault, elapsed)
    if staging.complete_through() < wanted.end:
        # The next peer finishes what this one began, whatever it left behind.
        outcome = place.direct.transfer(PROMPT, staging).run()
        assert outcome.error is None, outcome.error
    assert staging.complete_through() == wanted.end
    assert not wrong_entries(staging, wanted.end)
    where = "tls" if place.identity else "plain"
    return f"{where} {fault.kind}", result


@pytest.mark.timeout(60 + DRAWS // 5)
def test_no_fault_makes_a_wrong_entry(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        places = []
        for name in NAMES:
            for identity in (None, AUTHORITY.issue("node")) if name in ("attention", "composite") else (None,):
                layout = LAYOUTS[name]
                producer = SyntheticProducer(layout, chunk=32, limit=64)
                stack.callback(producer.close)
                options = ServerOptions(
                    frame_bytes=2048, keep_alive=0.05, handshake_seconds=15, send_seconds=2, max_handshakes=64
                )
                server = stack.enter_context(
                    PrefillServer(producer, layout, fingerprint(layout), identity=identity, options=options)
                )
                direct = handoff(server.address, layout, identity=identity, options=ClientOptions())
                place = Place(layout, server, identity, direct, {})
                stack.callback(place.direct.close)
                places.append(place)
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda number: one_draw(number, places), range(DRAWS)))
        seconds = time.monotonic() - began
    tally = Counter(results)
    with capsys.disabled():
        print(f"\n{DRAWS} faults, seed {SEED}, {seconds:.0f} s; no wrong entry, no hang:")
        for kind in sorted({kind for kind, _ in tally}):
            outcomes = ", ".join(f"{count} {result}" for (k, result), count in sorted(tally.items()) if k == kind)
            print(f"  {kind}: {outcomes}")
    broken = sum(count for (_, result), count in tally.items() if result != "complete")
    assert broken > DRAWS / 2, "most faults should have had an effect"
