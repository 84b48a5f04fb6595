"""From a decoded token to what its reader is told."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np

from tandem.engines.mlx.logprobs import score
from tandem.engines.mlx.request import Sequence
from tandem.errors import EngineError
from tandem.types import Event, Failure

logger = logging.getLogger("tandem.mlx")


def read_token(sequence: Sequence, token: int, logprobs: mx.array | None) -> list[Event]:
    """The events of a new token. A failure is this sequence's alone.

    Args:
        logprobs: of the whole vocabulary, `[vocabulary]`, if somebody reads them.
    """
    answer = sequence.answer
    if sequence.broken is not None and answer.generated >= sequence.sound_tokens:
        return [Failure.of(sequence.broken)]
    try:
        top = answer.request.logprobs
        described = None
        if top is not None and logprobs is not None:
            described = score(token, np.array(logprobs.astype(mx.float32)), top)
        return answer.add(token, described)
    except Exception as error:
        logger.exception("reading the answer of request %s failed", sequence.request_id)
        return [Failure.of(EngineError(f"The answer could not be read: {error}"))]
