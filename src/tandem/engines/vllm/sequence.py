"""A request on its way through vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.engines.answer import Answer
from tandem.engines.handoff.sequence import RemoteSequence
from tandem.engines.vllm.received import Received
from tandem.errors import TandemError
from tandem.models.constraint import Constraint

if TYPE_CHECKING:
    from vllm import SamplingParams
else:
    SamplingParams = Any


class Sequence(RemoteSequence):
    """One request.

    Attributes:
        params: what vLLM is asked for. Belongs to vLLM once the request is submitted.
        vllm_id: the name that vLLM gives it; empty before it has it.
        accepted: work on the prompt has begun.
        cached: prompt tokens that were in the cache before.
        spared: prompt tokens that vLLM need not compute: those, and received ones.
        position: prompt tokens in the cache.
        decoding: the prompt is in the cache and its answer has begun.
        broken: why its answer cannot go on.
        received: what other nodes computed of its prompt, until its answer begins.
    """

    def __init__(
        self, request_id: str, answer: Answer, params: SamplingParams, constraint: Constraint | None = None
    ) -> None:
        super().__init__(request_id, answer)
        self.params = params
        self.constraint = constraint
        self.vllm_id = ""
        self.accepted = False
        self.cached = self.spared = 0
        self.position = 0
        self.decoding = False
        self.broken: TandemError | None = None
        self.received: Received | None = None

    @property
    def missing(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return len(self.tokens) - self.position
