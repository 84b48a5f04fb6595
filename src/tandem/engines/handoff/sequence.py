"""A request whose prompt another node may process."""

from __future__ import annotations

from tandem.engines.answer import Answer
from tandem.engines.base import Prepared
from tandem.engines.handoff.remote import RemotePrefill


class RemoteSequence(Prepared):
    """What hand-offs need of an engine's request.

    Attributes:
        remote: while another node processes the prompt.
        may_hand_off: another node may be asked to process it.
        told: prompt tokens that its reader knows another node to have computed.
        mixed: entries of its cache were computed by weights of another quantisation.
    """

    def __init__(self, request_id: str, answer: Answer) -> None:
        self.request_id = request_id
        self.answer = answer
        self.remote: RemotePrefill | None = None
        self.may_hand_off = True
        self.told = 0
        self.mixed = False

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids."""
        return self.answer.prompt.token_ids

    @property
    def scored(self) -> bool:
        """Whether the prompt's own tokens get log-probabilities, for which all of them must be computed."""
        return self.answer.request.prompt_logprobs is not None

    @property
    def keeps_prefix(self) -> bool:
        """Whether the prefix cache takes part.

        It keeps what these weights computed and nothing else: its entries serve prompts after the link is gone, and
        nodes whose own link allows no other weights.
        """
        return self.answer.request.use_prefix_cache and not self.mixed
