"""A request on its way through the simulated engine."""

from __future__ import annotations

from tandem.engines.answer import Answer
from tandem.engines.handoff.sequence import RemoteSequence
from tandem.kv.outcome import Outcome


class Sequence(RemoteSequence):
    """One request.

    Attributes:
        script: tokens of the answer, if the profile sets it.
        position: prompt tokens in the cache; -1 before work on it begins.
        state: hash of all tokens in the cache.
        written: the answer's tokens so far.
        due: `time.monotonic()` of the next token.
        remote: while another node processes the prompt, or its entries are checked.
        outcome: of a transfer whose entries are being checked.
    """

    def __init__(self, request_id: str, answer: Answer, script: list[int]) -> None:
        super().__init__(request_id, answer)
        self.script = script
        self.position = -1
        self.state = 0
        self.written: list[int] = []
        self.due = 0.0
        self.outcome: Outcome | None = None

    @property
    def missing(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return len(self.tokens) - max(0, self.position)
