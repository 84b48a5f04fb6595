"""Processes killed in the middle of a hand-off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.errors import PeerLostError
from tandem.kv.control import Progress
from tandem.kv.plan import Wanted
from tests.kv.plane.support import PROMPT, HeldProducer, feed, handoff, serving, staged, wrong_entries

ROOT = Path(__file__).parents[3]


def start(*arguments: str) -> subprocess.Popen[str]:
    """One side of a hand-off as a process."""
    command = [sys.executable, "-m", "tests.kv.plane.program", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_prefill_process_killed_at_60_percent(how: signal.Signals) -> None:
    """What it had computed is kept: the next peer is asked for at most the remaining 40 % and a chunk."""
    process = start("server", "8000")
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client, staging = handoff(("127.0.0.1", port)), staged(Wanted(0, 4000))

        def on_progress(progress: Progress) -> None:
            if progress.processed >= 2400 and process.poll() is None:
                os.kill(process.pid, how)

        outcome = client.transfer(PROMPT, staging, on_progress=on_progress).run()
        client.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert isinstance(outcome.error, PeerLostError)
    assert 2400 - 100 <= outcome.complete < 4000
    assert not wrong_entries(staging, outcome.complete)
    with serving() as server:
        client = handoff(server.address)
        rest = client.transfer(PROMPT, staging).run()
        client.close()
    assert rest.error is None
    assert rest.tokens == 4000 - outcome.complete
    assert not wrong_entries(staging, 4000)


def test_a_decode_process_killed() -> None:
    """The server notices at once, although it has nothing to send, and the producer stops."""
    producer = HeldProducer()
    with serving(producer=producer) as server:
        process = start("client", str(server.address[1]))
        assert process.stdout is not None
        try:
            with producer._changed:
                assert producer._changed.wait_for(lambda: producer.jobs, 60)
            job = producer.jobs[0]
            feed(job, 0, 500)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert producer.wait_for_cancel() is job
        client = handoff(server.address)
        thread = threading.Thread(target=client.transfer(PROMPT, staged(Wanted(0, 50))).run)
        thread.start()
        second = producer.wait_for_job(1)
        feed(second, 0, 50)
        second.finish()
        thread.join()
        client.close()
