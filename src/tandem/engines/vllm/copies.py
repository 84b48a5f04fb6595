"""Getting what was read from the cache to the processor, without making the model's computation wait.

On a GPU, reading runs on a stream of its own, after the layer has written its entries and beside what computes the next
layers, into pinned memory; the arrays are handed over once the copy has happened, in the order of reading. On a CPU the
same calls read and hand over at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

Read: TypeAlias = Callable[[], Sequence[torch.Tensor]]
Give: TypeAlias = Callable[[list[torch.Tensor]], None]


class Copies(Protocol):
    """Copies under way."""

    def start(self, read: Read, give: Give) -> None:
        """Read once what the current stream does now is done; then call `give` with the tensors, in the processor's
        memory and nobody else's."""

    def poll(self) -> None:
        """Hand over what has arrived. Does not wait."""

    def finish(self) -> None:
        """Wait for everything and hand it over. The blocks that were read may be written again afterwards."""


class DirectCopies:
    """On a CPU: nothing is ever under way."""

    def start(self, read: Read, give: Give) -> None:
        give([tensor.contiguous() for tensor in read()])

    def poll(self) -> None:
        return

    def finish(self) -> None:
        return


class _Pending(NamedTuple):
    arrived: Any
    tensors: list[torch.Tensor]
    give: Give


class CudaCopies:
    """On a CUDA device.

    Args:
        accelerator: `torch.cuda`; a test can pass something that records what is called in which order.
    """

    def __init__(self, device: torch.device, accelerator: Any = torch.cuda) -> None:
        self._accelerator = accelerator
        self._device = device
        self._stream = accelerator.Stream(device)
        self._pending: deque[_Pending] = deque()

    def start(self, read: Read, give: Give) -> None:
        written = self._accelerator.Event()
        written.record(self._accelerator.current_stream(self._device))
        with self._accelerator.stream(self._stream):
            self._stream.wait_event(written)
            found = [tensor.contiguous() for tensor in read()]
            # Pinned memory comes from torch's cache of such blocks, which gives none back while a copy into it runs.
            arrived = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in found]
            for target, source in zip(arrived, found, strict=True):
                target.copy_(source, non_blocking=True)
            copied = self._accelerator.Event()
            copied.record(self._stream)
        self._pending.append(_Pending(copied, arrived, give))

    def poll(self) -> None:
        while self._pending and self._pending[0].arrived.query():
            self._give_first()

    def finish(self) -> None:
        while self._pending:
            self._pending[0].arrived.synchronize()
            self._give_first()

    def _give_first(self) -> None:
        first = self._pending.popleft()
        first.give(first.tensors)


def copies_for(device: torch.device) -> Copies:
    """What suits the device that the cache is on."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
