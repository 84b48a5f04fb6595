"""Hand-offs over real sockets that go well, and those that end early on purpose."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tandem.errors import (
    CancelledError,
    ContextTooLongError,
    EngineError,
    InvalidRequestError,
    PeerLostError,
    PeerRefusedError,
    PeerSilentError,
    PrefillBusyError,
)
from tandem.kv.control import Progress
from tandem.kv.intervals import Span
from tandem.kv.job import Admission, PrefillJob
from tandem.kv.outcome import Outcome
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.server import ServerOptions
from tandem.kv.synthetic import SyntheticProducer
from tandem.kv.tls import Authority
from tandem.kv.transfer import Transfer
from tests.kv.layouts import LAYOUTS
from tests.kv.plane.support import PROMPT, QUICK, HeldProducer, feed, handoff, serving, staged, wrong_entries

AUTHORITY = Authority("a secret of this test cluster")


def in_background(transfer: Transfer) -> tuple[threading.Thread, list[Outcome]]:
    """Run a transfer in a thread."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(transfer.run()))
    thread.start()
    return thread, outcomes


def result(thread: threading.Thread, outcomes: list[Outcome]) -> Outcome:
    """The outcome of a transfer in the background, in bounded time."""
    thread.join(20)
    assert not thread.is_alive()
    return outcomes[0]


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_cache_arrives_whole(name: str, secret: bool) -> None:
    layout = LAYOUTS[name]
    identity = AUTHORITY.issue("node") if secret else None
    with serving(layout, identity=identity) as server:
        client = handoff(server.address, layout, identity=identity)
        # Around the synthetic chunk of 64, the windows of 24 and 40, and the shortest ones.
        for start, end, checkpoint in [
            (0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 63, 0), (0, 64, 0), (0, 65, 0), (0, 23, 0), (0, 25, 0), (0, 41, 0),
            (63, 64, 0), (64, 65, 0), (10, 300, 0), (10, 300, 50), (299, 300, 7), (0, 640, 64),
        ]:  # fmt: skip
            staging = staged(Wanted(start, end, checkpoint=checkpoint), layout)
            outcome = client.transfer(PROMPT, staging).run()
            assert outcome.error is None
            assert outcome.complete == end
            assert not wrong_entries(staging, end)
            assert outcome.payload_bytes == staging.plan.nbytes
        client.close()


def test_a_connection_serves_many_requests() -> None:
    with serving(identity=AUTHORITY.issue("server")) as server:
        client = handoff(server.address, identity=AUTHORITY.issue("client"))
        outcomes = [client.transfer(PROMPT, staged(Wanted(0, 100))).run() for _ in range(5)]
        assert [outcome.reused for outcome in outcomes] == [False, True, True, True, True]
        assert all(outcome.peer == "server" for outcome in outcomes)
        assert server.connections == 1
        client.close()


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_codecs(codec: str) -> None:
    layout = LAYOUTS["attention"]
    with serving(layout) as server:
        client = handoff(server.address, layout)
        staging = staged(Wanted(0, 500))
        outcome = client.transfer(PROMPT, staging, codecs=("unheard-of", codec)[1:]).run()
        assert (outcome.error, outcome.codec) == (None, codec)
        expected = SyntheticProducer(layout)
        exact = expected.cache.entries(PROMPT, 0, 0, 0, 500)
        expected.close()
        error = np.abs(staging.entries(0, 0, 0, 500) - exact).max()
        assert error <= {"raw": 0.0, "int8": 0.0041, "int4": 0.08}[codec]
        raw = layout.bytes_between(0, 500)
        assert outcome.payload_bytes == pytest.approx(raw / {"raw": 1, "int8": 64 / 18, "int4": 64 / 13}[codec])
        client.close()


def test_a_server_without_the_codec_sends_raw() -> None:
    with serving(options=ServerOptions(codecs=("raw",))) as server:
        client = handoff(server.address)
        staging = staged(Wanted(0, 100))
        outcome = client.transfer(PROMPT, staging, codecs=("int4", "int8")).run()
        assert (outcome.error, outcome.codec) == (None, "raw")
        assert not wrong_entries(staging, 100)
        client.close()


def test_parts_of_a_cache_from_several_servers() -> None:
    layout = LAYOUTS["attention"]
    with serving(layout) as one, serving(layout) as other:
        staging = staged(Wanted(0, 300), layout)
        clients = [handoff(one.address, layout), handoff(other.address, layout)]
        runs = [
            in_background(client.transfer(PROMPT, staging, wanted=Wanted(0, 300, Span(layer, layer + 1), heads)))
            for layer, client in enumerate(clients)
            for heads in (Span(0, 2), Span(2, 3))
        ]
        assert all(result(*run).error is None for run in runs)
        assert staging.complete_through() == 300
        assert not wrong_entries(staging, 300)
        for client in clients:
            client.close()


def test_the_prefix_cache_of_the_server_changes_nothing() -> None:
    """P2: the same entries, cold and warm."""
    layout = LAYOUTS["composite"]
    producer = SyntheticProducer(layout, chunk=64, cached=200)
    with serving(layout, producer) as server:
        client = handoff(server.address, layout)
        for wanted in (Wanted(0, 300), Wanted(250, 300), Wanted(0, 100)):
            staging = staged(wanted, layout)
            outcome = client.transfer(PROMPT, staging).run()
            assert outcome.error is None
            assert outcome.cached == min(200, wanted.end)
            assert not wrong_entries(staging, wanted.end)
        client.close()
    producer.close()


def test_entries_leave_while_the_rest_is_computed() -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        staging, told = staged(Wanted(0, 200)), []
        arrived = threading.Event()

        def on_progress(progress: Progress) -> None:
            told.append(progress)
            if progress.processed == 100:
                arrived.set()

        run = in_background(client.transfer(PROMPT, staging, on_progress=on_progress))
        job = producer.wait_for_job()
        np.testing.assert_array_equal(job.tokens, PROMPT[:200])
        feed(job, 0, 100)
        job.progress(100)
        assert arrived.wait(10)
        assert staging.complete_through() == 100
        assert not wrong_entries(staging, 100)
        feed(job, 100, 200)
        job.finish()
        assert result(*run).complete == 200
        assert [progress.processed for progress in told][-1] == 100
        client.close()


def test_a_long_prefill_is_kept_alive() -> None:
    """Exo's limit: a prefill longer than the socket's timeout always fails. Ours: only silence or no progress."""
    producer = HeldProducer()
    options = ServerOptions(keep_alive=0.02, frame_bytes=8192)
    with serving(producer=producer, options=options) as server:
        client = handoff(server.address, options=ClientOptions(silence=0.4, stall=30))
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 200))))
        job = producer.wait_for_job()
        # Three times the silence that a client accepts, without an entry.
        for step in range(12):
            threading.Event().wait(0.1)
            job.progress(step)
        feed(job, 0, 200)
        job.finish()
        outcome = result(*run)
        assert outcome.error is None
        assert outcome.computing > 1
        client.close()


def test_no_progress_is_noticed_despite_keep_alives() -> None:
    producer = HeldProducer()
    options = ServerOptions(keep_alive=0.02, frame_bytes=8192)
    with serving(producer=producer, options=options) as server:
        client = handoff(server.address, options=ClientOptions(silence=5, stall=0.3, queue=0.3))
        outcome = client.transfer(PROMPT, staged(Wanted(0, 200))).run()
        assert isinstance(outcome.error, PeerSilentError)
        assert "did not begin" in outcome.error.message
        producer.wait_for_cancel()
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 200))))
        job = producer.wait_for_job(1)
        feed(job, 0, 64)
        outcome = result(*run)
        assert isinstance(outcome.error, PeerSilentError)
        assert "computed nothing more" in outcome.error.message
        assert outcome.complete == 64
        client.close()


def test_cancelling_stops_both_sides_and_keeps_the_connection() -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        transfer = client.transfer(PROMPT, staged(Wanted(0, 200)))
        run = in_background(transfer)
        job = producer.wait_for_job()
        feed(job, 0, 64)
        transfer.cancel()
        outcome = result(*run)
        assert isinstance(outcome.error, CancelledError)
        assert producer.wait_for_cancel() is job
        assert job.cancelled
        with pytest.raises(CancelledError):
            feed(job, 64, 128)
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 64))))
        job = producer.wait_for_job(1)
        feed(job, 0, 64)
        job.finish()
        outcome = result(*run)
        assert (outcome.error, outcome.reused) == (None, True)
        client.close()


def test_cancelling_before_the_start() -> None:
    with serving() as server:
        client = handoff(server.address)
        transfer = client.transfer(PROMPT, staged(Wanted(0, 200)))
        transfer.cancel()
        assert isinstance(transfer.run().error, CancelledError)
        client.close()


def test_a_full_queue_answers_at_once() -> None:
    producer = SyntheticProducer(LAYOUTS["attention"], chunk=64, tokens_per_second=500, limit=0)

    def busy(job: PrefillJob) -> Admission:
        raise PrefillBusyError("full", retry_after=7.5)

    with serving(producer=HeldProducer(busy)) as server:
        client = handoff(server.address)
        outcomes = [client.transfer(PROMPT, staged(Wanted(0, 200))).run() for _ in range(2)]
        for outcome in outcomes:
            assert isinstance(outcome.error, PrefillBusyError)
            assert outcome.error.retry_after == 7.5
        assert outcomes[1].reused
        client.close()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        assert isinstance(client.transfer(PROMPT, staged(Wanted(0, 200))).run().error, PrefillBusyError)
        client.close()
    producer.close()


def test_the_queue_position_is_told() -> None:
    producer = HeldProducer(lambda job: Admission(3, 12.0))
    with serving(producer=producer) as server:
        client = handoff(server.address)
        told: list[Progress] = []
        begun = threading.Event()

        def on_progress(progress: Progress) -> None:
            told.append(progress)
            if progress.computing:
                begun.set()

        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 20)), on_progress=on_progress))
        job = producer.wait_for_job()
        job.queued(1)
        job.progress(0)
        assert begun.wait(10)
        feed(job, 0, 20)
        job.finish()
        outcome = result(*run)
        assert outcome.error is None
        assert told[0].position == 3
        assert outcome.queued >= 0
        client.close()


def test_errors_keep_their_message_and_the_connection() -> None:
    """P7: an error after the first entries is an error, and what came before it is usable."""
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 200))))
        job = producer.wait_for_job()
        feed(job, 0, 64)
        job.fail(EngineError("out of memory"))
        outcome = result(*run)
        assert isinstance(outcome.error, PeerRefusedError)
        assert "out of memory" in outcome.error.message
        assert outcome.complete == 64
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 64))))
        job = producer.wait_for_job(1)
        feed(job, 0, 64)
        job.finish()
        assert result(*run).reused
        client.close()


def test_a_producer_that_forgets_entries_cannot_finish() -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 200))))
        job = producer.wait_for_job()
        feed(job, 0, 199)
        with pytest.raises(EngineError, match="without tokens of"):
            job.finish()
        outcome = result(*run)
        assert isinstance(outcome.error, PeerRefusedError)
        assert outcome.complete == 199
        client.close()


def test_the_producers_mistakes_are_its_own() -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        run = in_background(client.transfer(PROMPT, staged(Wanted(10, 200))))
        job = producer.wait_for_job()
        feed(job, 0, 64)
        with pytest.raises(ValueError, match="overlap"):
            feed(job, 63, 64)
        for wrong in (
            np.zeros((3, 4, 16), np.float16),
            np.zeros((3, 4, 15), np.float32),
            np.zeros((4, 4, 16), np.float32),
        ):
            with pytest.raises(ValueError, match=r"fit|no heads"):
                job.emit(0, 0, 64, wrong)
        feed(job, 64, 200)
        job.finish()
        with pytest.raises(ValueError, match="ended"):
            job.emit(0, 0, 199, np.zeros((3, 1, 16), np.float32))
        assert result(*run).error is None
        client.close()


def test_a_slow_client_holds_its_producer_back_and_no_other() -> None:
    producer = HeldProducer()
    options = ServerOptions(backlog_bytes=1, frame_bytes=8192)
    with serving(producer=producer, options=options) as server:
        client, other = handoff(server.address), handoff(server.address)
        stopped = threading.Event()
        run = in_background(
            client.transfer(PROMPT, staged(Wanted(0, 64)), on_progress=lambda _: stopped.wait(10) and None)
        )
        job = producer.wait_for_job()
        job.emit(0, 0, 0, np.zeros((3, 64, 16), np.float32))
        quick = in_background(other.transfer(PROMPT, staged(Wanted(0, 64))))
        second = producer.wait_for_job(1)
        feed(second, 0, 64)
        second.finish()
        assert result(*quick).error is None
        stopped.set()
        job.fail(EngineError("enough"))
        assert result(*run).error is not None
        client.close()
        other.close()


def test_requests_that_cannot_be() -> None:
    with serving(options=ServerOptions(max_tokens=100)) as server:
        client = handoff(server.address)
        outcome = client.transfer(PROMPT, staged(Wanted(0, 101))).run()
        assert isinstance(outcome.error, PeerRefusedError)
        assert "limit of 100" in outcome.error.message
        assert client.transfer(PROMPT, staged(Wanted(0, 100))).run().error is None
        with pytest.raises(InvalidRequestError, match="whole prompt"):
            client.transfer(PROMPT[:10], staged(Wanted(0, 11)))
        with pytest.raises(InvalidRequestError, match="No codec"):
            client.transfer(PROMPT, staged(Wanted(0, 11)), codecs=("zip",))
        client.close()


def test_a_refusing_producer_says_why() -> None:
    def refuse(job: PrefillJob) -> Admission:
        raise ContextTooLongError("The prompt is too long for this model.")

    with serving(producer=HeldProducer(refuse)) as server:
        client = handoff(server.address)
        outcome = client.transfer(PROMPT, staged(Wanted(0, 101))).run()
        assert isinstance(outcome.error, PeerRefusedError)
        assert "context_length_exceeded" in outcome.error.message
        assert outcome.complete == 0
        client.close()


def test_the_rest_comes_from_the_next_peer() -> None:
    layout = LAYOUTS["composite"]
    producer = HeldProducer()
    with serving(layout, producer) as dying, serving(layout) as second:
        first, other = handoff(dying.address, layout), handoff(second.address, layout)
        staging = staged(Wanted(0, 300, checkpoint=100), layout)
        run = in_background(first.transfer(PROMPT, staging))
        job = producer.wait_for_job()
        feed(job, 0, 100)
        feed(job, 100, 200)
        feed(job, 200, 250)
        job.fail(EngineError("lost power"))
        assert result(*run).complete == 200
        transfer = other.transfer(PROMPT, staging)
        outcome = transfer.run()
        assert (outcome.error, outcome.tokens, outcome.complete) == (None, 100, 300)
        assert not wrong_entries(staging, 300)
        first.close()
        other.close()


def test_a_server_that_goes_away_ends_the_request() -> None:
    producer = HeldProducer()
    with serving(producer=producer) as server:
        client = handoff(server.address)
        run = in_background(client.transfer(PROMPT, staged(Wanted(0, 200))))
        feed(producer.wait_for_job(), 0, 64)
        server.close()
        outcome = result(*run)
        assert isinstance(outcome.error, PeerLostError)
        assert producer.cancelled
        assert isinstance(client.transfer(PROMPT, staged(Wanted(0, 20))).run().error, PeerLostError)
        client.close()


def test_a_kept_connection_that_died_is_replaced() -> None:
    layout = LAYOUTS["attention"]
    with serving(layout) as server:
        client = handoff(server.address, layout)
        assert client.transfer(PROMPT, staged(Wanted(0, 20))).run().error is None
        address = server.address
    with serving(layout, options=ServerOptions(port=address[1])) as server:
        outcome = client.transfer(PROMPT, staged(Wanted(0, 20))).run()
        assert (outcome.error, outcome.reused) == (None, False)
    client.close()


def test_many_clients_at_once() -> None:
    layout = LAYOUTS["composite"]
    producer = SyntheticProducer(layout, chunk=64, limit=64)
    with serving(layout, producer) as server:
        clients = [handoff(server.address, layout, options=QUICK) for _ in range(8)]
        stagings = [staged(Wanted(number, 200 + number), layout) for number in range(16)]
        runs = [in_background(clients[number % 8].transfer(PROMPT, staging)) for number, staging in enumerate(stagings)]
        for staging, run in zip(stagings, runs, strict=True):
            assert result(*run).error is None
            assert not wrong_entries(staging, staging.plan.wanted.end)
        for client in clients:
            client.close()
    producer.close()
