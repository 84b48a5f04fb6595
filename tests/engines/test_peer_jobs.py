"""Several prefills for peers at a time, as vLLM does them: without vLLM, what is asked of it is played here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.vllm.exchange import Registry, Tap
from tandem.engines.vllm.peer_work import MOST_AT_ONCE, VllmPeerWork
from tandem.errors import EngineError, InvalidRequestError, PrefillBusyError
from tandem.kv.control import Done
from tandem.kv.job import PrefillJob
from tandem.kv.layout import Layer, Layout, Part, StateArray
from tandem.kv.plan import Plan, Wanted
from tandem.kv.synthetic import SyntheticCache

LAYOUT = Layout(
    (
        Layer("tokens", (Part("keys", 2, 8, "float32"), Part("values", 2, 8, "float32"))),
        Layer("window", (Part("keys", 2, 8, "float32"), Part("values", 2, 8, "float32")), window=16),
        Layer("state", states=(StateArray("0", (1, 3, 4), "float32"),)),
    )
)
CHUNK = 32
PROMPT = np.random.default_rng(3).integers(0, 1000, 400).astype(np.uint32)


class Played:
    """vLLM's part: every step computes a chunk of each prompt, and its entries go to the prompt's tap."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.positions: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.longest = 10_000
        self._cache = SyntheticCache(LAYOUT)

    def read(self, request_id: str, tokens: list[int]) -> str:
        if len(tokens) > self.longest:
            raise InvalidRequestError("The prompt is too long.")
        self.prompts[request_id], self.positions[request_id] = tokens, 0
        return f"{request_id}-0123abcd"

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        del self.positions[request_id]

    def progress(self, vllm_id: str) -> tuple[int, int]:
        return self.positions[vllm_id[:-9]], 0

    def step(self) -> set[str]:
        finished = set()
        for name, before in list(self.positions.items()):
            end = min(before + CHUNK, len(self.prompts[name]))
            found = self.registry.tap_of(f"{name}-0123abcd")
            if found is not None:
                self._tell(*found, np.asarray(self.prompts[name], np.uint32), before, end)
            self.positions[name] = end
            if end == len(self.prompts[name]):
                finished.add(name)
                del self.positions[name]
        return finished

    def _tell(self, tap: Tap, first: int, tokens: np.ndarray, start: int, end: int) -> None:
        for index, layer in enumerate(LAYOUT.layers):
            for span in tap.needs(index, max(start, first), end) if layer.parts and end > first else ():
                for part in range(2):
                    tap.entries(index, part, span.start, self._cache.entries(tokens, index, part, *span))
            for number in range(len(layer.states)):
                if tap.needs_state(index, end):
                    tap.state(index, number, end, self._cache.state(tokens, index, number, end))
        tap.computed(end, 0)


class Work:
    """The work, and what it needs."""

    def __init__(self) -> None:
        self.registry = Registry("test")
        self.desk = PrefillDesk(lambda: None, lambda tokens: tokens / 1000, limit=12)
        self.played = Played(self.registry)
        self.work = VllmPeerWork(self.desk, self.registry, self.played)

    def job(self, end: int, *, start: int = 0, client: str = "a", backlog: int = 1 << 30) -> PrefillJob:
        job = PrefillJob(Plan(LAYOUT, Wanted(start, end)), PROMPT[:end], client=client, backlog_bytes=backlog)
        self.desk.submit(job)
        return job

    def step(self) -> int:
        self.work.step(CHUNK, idle=False)
        return self.work.stepped(self.played.step())

    def run(self, until: Callable[[], bool]) -> None:
        for _ in range(1000):
            if until():
                return
            self.step()
        raise AssertionError("it never happened")

    def check_empty(self) -> None:
        assert not self.work.pending
        assert self.registry.empty
        assert not self.played.positions


def sent(job: PrefillJob) -> int:
    """Take everything that waits; how many pieces that were."""
    count = 0
    while job.take() is not None:
        count += 1
    return count


@pytest.fixture
def work() -> Work:
    return Work()


def test_all_that_wait_are_computed_together(work: Work) -> None:
    jobs = [work.job(end, start=start) for end, start in ((1, 0), (2, 1), (100, 0), (33, 7), (400, 399))]
    work.step()
    assert work.work.reading == 3, "the two short ones are done"
    work.run(lambda: not work.work.pending)
    for job in jobs:
        assert isinstance(job.end, Done)
        assert job.end.end == job.plan.wanted.end
        assert job.latest_progress.processed == job.plan.wanted.end
    assert [len(tokens) for tokens in work.played.prompts.values()] == [1, 2, 100, 33, 400]
    work.check_empty()


def test_computed_tokens_are_counted(work: Work) -> None:
    work.job(100)
    work.job(20)
    assert [work.step() for _ in range(4)] == [CHUNK + 20, CHUNK, CHUNK, 4]


def test_only_so_many_at_once_and_clients_take_turns(work: Work) -> None:
    jobs = [work.job(200, client="many") for _ in range(MOST_AT_ONCE)]
    work.step()
    later = [work.job(50, client="many") for _ in range(2)]
    other = work.job(50, client="few")
    assert work.work.reading == MOST_AT_ONCE
    assert other.latest_progress.processed == 0
    admission = work.desk.submit(PrefillJob(Plan(LAYOUT, Wanted(0, 5)), PROMPT[:5], client="few"))
    assert admission.position == MOST_AT_ONCE + 3
    work.run(lambda: all(job.end is not None for job in jobs))
    work.run(lambda: all(job.end is not None for job in (*later, other)))
    names = {len(tokens): name for name, tokens in reversed(work.played.prompts.items())}
    assert names[5] == f"peer-{MOST_AT_ONCE + 3}"


def test_a_full_queue_says_so(work: Work) -> None:
    for _ in range(12):
        work.job(50)
    with pytest.raises(PrefillBusyError):
        work.job(50)


def test_a_slow_client_holds_up_nobody(work: Work) -> None:
    slow, quick = work.job(300, backlog=1), work.job(300)
    work.run(lambda: isinstance(quick.end, Done))
    work.step()
    assert slow.end is None
    assert work.work.reading == 0
    pieces = 0
    for _ in range(500):
        pieces += sent(slow)
        work.step()
        if slow.end is not None:
            break
    assert isinstance(slow.end, Done)
    assert pieces + sent(slow) == sent(quick)
    work.check_empty()


def test_cancelling_aborts_and_leaves_nothing(work: Work) -> None:
    running, kept = work.job(300), work.job(300)
    work.step()
    waiting = work.job(10)
    for job in (running, waiting):
        job.cancel()
        work.desk.cancel(job)
    work.step()
    assert work.played.aborted == ["peer-0"]
    work.run(lambda: not work.work.pending)
    assert isinstance(kept.end, Done)
    assert waiting.end is None
    work.check_empty()


def test_a_prompt_that_is_refused_fails_alone(work: Work) -> None:
    work.played.longest = 100
    good, bad = work.job(100), work.job(101)
    work.run(lambda: not work.work.pending)
    assert isinstance(bad.end, InvalidRequestError)
    assert isinstance(good.end, Done)
    work.check_empty()


def test_entries_that_cannot_be_read_fail_the_job(work: Work) -> None:
    job = work.job(100)
    work.work.step(CHUNK, idle=False)
    found = work.registry.tap_of("peer-0")
    assert found is not None
    found[0].failed(RuntimeError("out of memory"))
    work.run(lambda: not work.work.pending)
    assert isinstance(job.end, EngineError)
    assert "out of memory" in job.end.message
    work.check_empty()


def test_missing_entries_are_an_error_and_never_an_answer(work: Work) -> None:
    job = work.job(100)
    work.work.step(CHUNK, idle=False)
    work.registry.drop("peer-0")
    work.run(lambda: not work.work.pending)
    assert isinstance(job.end, EngineError)


def test_closing_tells_the_clients(work: Work) -> None:
    job = work.job(100)
    work.step()
    work.work.close()
    assert isinstance(job.end, EngineError)
    work.check_empty()
