"""One prefill for another node on its way through vLLM: what the connector reads, handed to the job that sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tandem.errors import CancelledError, EngineError, TandemError
from tandem.kv.dtypes import Array
from tandem.kv.intervals import Span
from tandem.kv.job import PrefillJob


class _Piece(NamedTuple):
    layer: int
    part: int
    token: int
    array: Array
    is_state: bool


class PeerJob:
    """A job that vLLM works on, and the tap (`exchange.Tap`) through which its entries come.

    Entries that the client is too slow for are held here: the engine thread must not wait for it. They are what vLLM
    computed of one prompt at most.

    Attributes:
        request_id: its name in vLLM.
        vllm_id: the name that vLLM made of it.
        computed_all: vLLM is done with it.
        processed, cached: tokens that vLLM has computed, and those of them that it had in its prefix cache.
    """

    def __init__(self, request_id: str, job: PrefillJob) -> None:
        self.request_id = request_id
        self.job = job
        self.vllm_id = ""
        self.computed_all = False
        self.processed = 0
        self.cached = 0
        self._held: deque[_Piece] = deque()
        self._held_bytes = 0
        self._error: TandemError | None = None

    @property
    def held_bytes(self) -> int:
        """Of entries that wait for the client."""
        return self._held_bytes

    # --------------------------------------------------------------------------------------- the tap: in vLLM's step

    def needs(self, layer: int, start: int, end: int) -> Sequence[Span]:
        """See `exchange.Tap`."""
        self._check_wanted()
        return self.job.needs(layer, start, end)

    def entries(self, layer: int, part: int, start: int, array: Array) -> None:
        """See `exchange.Tap`."""
        self._give(_Piece(layer, part, start, array, False))

    def needs_state(self, layer: int, tokens: int) -> bool:
        """See `exchange.Tap`."""
        self._check_wanted()
        return layer in self.job.plan.layers and tokens in self.job.plan.checkpoints

    def state(self, layer: int, number: int, tokens: int, array: Array) -> None:
        """See `exchange.Tap`."""
        self._give(_Piece(layer, number, tokens, array, True))

    def computed(self, tokens: int, cached: int) -> None:
        """See `exchange.Tap`. Progress is told by what vLLM's scheduler says, which knows of steps without entries."""

    def failed(self, error: Exception) -> None:
        """See `exchange.Tap`."""
        self._error = EngineError(f"The prompt's cache could not be read: {error}")

    def _check_wanted(self) -> None:
        if self.job.cancelled:
            raise CancelledError("Nobody waits for this prefill any more.")

    def _give(self, piece: _Piece) -> None:
        self._check_wanted()
        self._held.append(piece)
        self._held_bytes += piece.array.nbytes
        try:
            self.hand_over()
        except CancelledError:
            raise
        except Exception as error:
            self.failed(error)
            raise

    # ------------------------------------------------------------------------------------------- between vLLM's steps

    def hand_over(self) -> None:
        """Queue for the client what there is room for.

        Raises:
            CancelledError: nobody wants it any more.
        """
        while self._held and not self.job.congested:
            piece = self._held.popleft()
            self._held_bytes -= piece.array.nbytes
            if piece.is_state:
                self.job.emit_state(piece.layer, piece.part, piece.token, piece.array)
            else:
                self.job.emit(piece.layer, piece.part, piece.token, piece.array)

    def advanced(self, processed: int, cached: int) -> int:
        """vLLM has `processed` tokens now, `cached` of them from its prefix cache.

        Returns:
            How many were computed since the last call.
        """
        processed = min(processed, self.job.plan.wanted.end)
        if not processed:
            return 0
        self.cached = max(self.cached, cached)
        before, self.processed = max(self.processed, cached), max(self.processed, processed)
        self.job.progress(self.processed, cached=self.cached)
        return max(0, self.processed - before)

    def settle(self) -> bool:
        """Hand over what waits, and end the job if it is whole.

        Returns:
            Whether nothing is left to do.
        """
        try:
            self._check_wanted()
            self.hand_over()
            if self._error is not None:
                raise self._error
            if not self.computed_all or self._held:
                return False
            self.job.progress(self.job.plan.wanted.end, cached=self.cached)
            self.job.finish()
        except CancelledError:
            pass
        except TandemError as error:
            self.job.fail(error)
        return True
