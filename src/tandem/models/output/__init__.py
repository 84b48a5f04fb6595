"""Tokens to events: text, reasoning, tool calls and log-probabilities of one answer, while it is being written."""

from tandem.models.output.processor import OutputProcessor
from tandem.models.output.scores import TokenScore

__all__ = ["OutputProcessor", "TokenScore"]
