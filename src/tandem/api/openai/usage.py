"""Token counts and generation statistics, in OpenAI's and exo's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.types import Finished, Statistics


def usage_object(finished: Mapping[int, Finished], answers: int) -> dict[str, Any]:
    """The usage of a whole response.

    Args:
        finished: each answer's last event, by its number.
        answers: answers per prompt: a prompt that is answered several times counts once.
    """
    firsts = [last.usage for number, last in finished.items() if number % answers == 0]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(last.usage.completion_tokens for last in finished.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in firsts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(last.usage.reasoning_tokens for last in finished.values()),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def generation_stats(statistics: Statistics, bytes_key: str) -> dict[str, Any]:
    """exo's `generation_stats` with our own fields beside it.

    Args:
        bytes_key: how exo spells the member of `peak_memory_usage`: `inBytes` in bodies, `in_bytes` in comments.
    """
    fields: dict[str, Any] = msgspec.to_builtins(statistics)
    fields["peak_memory_usage"] = {bytes_key: fields.pop("peak_memory")}
    return fields


def stats_comments(finished: Mapping[int, Finished]) -> bytes:
    """One `: generation_stats` SSE comment per answer."""
    return b"".join(
        b": generation_stats " + msgspec.json.encode(generation_stats(last.statistics, "in_bytes")) + b"\n\n"
        for _, last in sorted(finished.items())
    )
