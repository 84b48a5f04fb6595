"""The identity that every chunk and the whole of one response share."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """One response to come.

    Attributes:
        request_id: what `/v1/cancel` takes, too.
        model: the served model's id.
        answers: answers per prompt.
        include_usage: the stream ends with a usage chunk.
    """

    request_id: str
    model: str
    answers: int = 1
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """The members that come first in every object of this response."""
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


def new_id(prefix: str) -> str:
    """A fresh response id."""
    return f"{prefix}-{uuid.uuid4().hex}"
