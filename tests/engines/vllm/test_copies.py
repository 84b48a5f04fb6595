"""The order of things on a CUDA device, seen on something that behaves like one and records what is called."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable here: run these tests with vLLM's interpreter")

from tandem.engines.vllm.copies import CudaCopies, DirectCopies, copies_for  # noqa: E402


class Accelerator:
    """Streams and events that only write down what is done with them; events happen when `pass_time` says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[Any] = []
        self._stream = "compute"
        accelerator = self

        class Stream:
            def __init__(self, device: Any) -> None:
                self.name = "side"

            def wait_event(self, event: Any) -> None:
                accelerator.log.append(f"side waits for {event.name}")

        class Event:
            def __init__(self) -> None:
                self.name = f"event {len(accelerator.events)}"
                self.happened = False
                accelerator.events.append(self)

            def record(self, stream: Any) -> None:
                accelerator.log.append(f"{self.name} on {getattr(stream, 'name', stream)}")

            def query(self) -> bool:
                return self.happened

            def synchronize(self) -> None:
                accelerator.log.append(f"wait for {self.name}")
                self.happened = True

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: Any) -> str:
        return self._stream

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self._stream, before = stream.name, self._stream
        yield
        self._stream = before


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no pinned memory."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))


@pytest.mark.usefixtures("unpinned")
def test_reads_behind_the_writes_and_gives_in_order() -> None:
    accelerator = Accelerator()
    copies = CudaCopies(torch.device("cpu"), accelerator)
    given: list[Any] = []

    def read(number: int) -> Any:
        accelerator.log.append(f"read {number} on {accelerator.current_stream(None)}")
        return [torch.full((2,), number)]

    for number in range(3):
        copies.start(lambda number=number: read(number), given.append)
    assert accelerator.log[:4] == ["event 0 on compute", "side waits for event 0", "read 0 on side", "event 1 on side"]
    copies.poll()
    assert given == []
    # The last copy is done, but the first is not: nothing is given yet.
    accelerator.events[5].happened = True
    copies.poll()
    assert given == []
    accelerator.events[1].happened = True
    copies.poll()
    assert [int(tensors[0][0]) for tensors in given] == [0]
    copies.finish()
    assert [int(tensors[0][0]) for tensors in given] == [0, 1, 2]
    assert accelerator.log[-2:] == ["wait for event 3", "wait for event 5"]


def test_direct() -> None:
    given: list[Any] = []
    source = torch.arange(12).view(3, 4)
    copies = copies_for(torch.device("cpu"))
    assert isinstance(copies, DirectCopies)
    copies.start(lambda: [source.T], given.append)
    assert torch.equal(given[0][0], source.T)
    assert given[0][0].is_contiguous()
