"""What the bench and the programs that hold its nodes say to one another: one JSON object a line."""

from __future__ import annotations

import msgspec

from tandem.types.facts import EngineFact


class HostSettings(msgspec.Struct, frozen=True):
    """What a program is started with.

    Attributes:
        home: folder for its nodes' homes.
        engines: of this machine, probed once for all nodes.
    """

    nodes: int
    home: str
    cluster_name: str
    secret: str
    engines: tuple[EngineFact, ...]


class Started(msgspec.Struct, frozen=True):
    """Times of the machine's monotonic clock, in seconds: when the last node was told to start, and when all had."""

    node_ids: list[str]
    called: float
    started: float


class Traffic(msgspec.Struct, frozen=True):
    """What became of the requests that entered at some nodes. Times of the machine's monotonic clock, in seconds.

    Attributes:
        answered: requests whose answer is complete.
        tokens: of those.
        retried: requests that went on elsewhere after a failure before their first token.
        failed_before: requests that ended in an error before their first token.
        failed_after: the same, after it.
        never_ended: requests that had not ended at the deadline.
        short: answers that ended with fewer tokens than asked for, though nothing said so. A fault.
        errors: some messages, with how often each kind came.
        longest: seconds of the slowest request that ended.
    """

    began: float
    ended: float
    answered: int
    tokens: int
    retried: int
    failed_before: int
    failed_after: int
    never_ended: int
    short: int
    errors: dict[str, int]
    longest: float


def together(parts: list[Traffic]) -> Traffic:
    """The traffic of several programs as one."""
    errors: dict[str, int] = {}
    for part in parts:
        for text, count in part.errors.items():
            errors[text] = errors.get(text, 0) + count

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return Traffic(
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        answered=total("answered"),
        tokens=total("tokens"),
        retried=total("retried"),
        failed_before=total("failed_before"),
        failed_after=total("failed_after"),
        never_ended=total("never_ended"),
        short=total("short"),
        errors=errors,
        longest=max(part.longest for part in parts),
    )
