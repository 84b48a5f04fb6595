"""Who is alive, as a value that tokens, heartbeats and time change. Knows no network, so that every order of events
can be tried.

A token proves a process and its link, a heartbeat proves its loop: a node counts while it has both. A node that opened
its session anew loses its token for a moment, which is forgiven if it comes back at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import xxhash

SILENT = 5.0
"""Seconds without a heartbeat after which a node counts as dead, whatever its token says."""
RESTARTED = 2.5
"""Seconds without one that are enough when another life of the same node is heard."""
GRACE = 0.3
"""Seconds that a token may be away."""
OWN_GRACE = 3.0
"""The same after this side opened its session anew and has to be told of everybody again."""
FORGET = 30.0
"""Seconds after which a life that never got anywhere is forgotten."""
LISTED = 10.0
"""Seconds for which a list of what somebody else sees counts."""
MOST_LIVES = 4096

Reason: TypeAlias = Literal["closed", "unreachable", "silent", "restarted"]
Key: TypeAlias = tuple[str, str]


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A node that the sender of a heartbeat sees alive. `endpoints` as `scheme/host:port`."""

    node_id: str
    life: str
    endpoints: tuple[str, ...]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """What every node says once a second.

    Attributes:
        age: seconds since this life began, by its own clock.
        zid: zenoh's id of its session.
        endpoints: where it can be dialled.
        leaving: the last one.
        known: everyone it sees alive. Mostly empty: with n nodes it makes n³ entries of each round of heartbeats.
        payload: opaque here.
        digest: of everyone it sees alive and itself, see `digest_of`; 0 if it does not say.
    """

    node_id: str
    life: str
    age: float
    zid: str
    endpoints: tuple[str, ...] = ()
    leaving: bool = False
    known: tuple[Known, ...] = ()
    payload: bytes = b""
    digest: int = 0


class Joined(msgspec.Struct, frozen=True):
    """A node, or a new life of one, is there."""

    node_id: str
    life: str
    payload: bytes


class Left(msgspec.Struct, frozen=True):
    """A life ended, as far as can be seen from here.

    `closed`: it said so. `unreachable`: its process died or its link broke. `silent`: its loop hangs. `restarted`:
    another life of the node took its place.
    """

    node_id: str
    life: str
    reason: Reason


class Heard(msgspec.Struct, frozen=True):
    """A joined node's heartbeat."""

    node_id: str
    life: str
    payload: bytes


class Conflict(msgspec.Struct, frozen=True):
    """Another process with this node's id was there first."""

    node_id: str
    life: str
    endpoints: tuple[str, ...]


MemberEvent: TypeAlias = Joined | Left | Heard | Conflict


def digest_of(lives: Iterable[Key]) -> int:
    """Equal for equal sets of lives: xxh3-64 of each `node/life`, combined by exclusive or."""
    digest = 0
    for node_id, life in lives:
        digest ^= xxhash.xxh3_64_intdigest(f"{node_id}/{life}".encode())
    return digest


@dataclass
class _Life:
    seen: float
    """When anything was known of it last."""
    token: bool = False
    lost: float = float("-inf")
    """The token counts as there until then."""
    beat: Heartbeat | None = None
    heard: float = float("-inf")
    known: tuple[Known, ...] = ()
    """The last list that it sent, unless it agreed with this side since."""
    listed: float = float("-inf")

    def has_token(self, now: float) -> bool:
        return self.token or now < self.lost

    def alive(self, now: float) -> bool:
        return self.beat is not None and not self.beat.leaving and self.has_token(now) and now - self.heard < SILENT


@dataclass
class Roster:
    """Times are of one monotonic clock, in seconds. `began`: when this life did.

    Attributes:
        joined: the life that counts, by node id.
    """

    node_id: str
    life: str
    began: float
    joined: dict[str, str] = field(default_factory=dict)
    _lives: dict[Key, _Life] = field(default_factory=dict)
    _conflicts: set[str] = field(default_factory=set)

    def token(self, node_id: str, life: str, up: bool, now: float) -> None:
        """A token came or went."""
        if up and (node_id, life) != (self.node_id, self.life) and len(self._lives) < MOST_LIVES:
            self._lives.setdefault((node_id, life), _Life(now))
        known = self._lives.get((node_id, life))
        if known is None:
            return
        if known.token and not up:
            known.lost = now + GRACE
        known.token, known.seen = up, now

    def reopened(self, now: float) -> None:
        """This side's session is a new one: all tokens have to be seen again."""
        for known in self._lives.values():
            if known.token:
                known.token, known.lost = False, now + OWN_GRACE

    def stalled(self, now: float) -> None:
        """This side did not listen for a while, so that nobody's silence says anything."""
        for known in self._lives.values():
            if known.beat is not None:
                known.heard = now

    def beat(self, beat: Heartbeat, now: float) -> list[MemberEvent]:
        """A heartbeat came.

        Returns:
            `Heard` if the node has joined; `Conflict`, once for each, if it claims this node's id.
        """
        key = (beat.node_id, beat.life)
        if key == (self.node_id, self.life) or (key not in self._lives and len(self._lives) >= MOST_LIVES):
            return []
        known = self._lives.setdefault(key, _Life(now))
        known.beat, known.heard, known.seen = beat, now, now
        if beat.known:
            known.known, known.listed = beat.known, now
        elif known.known and beat.digest == self.digest:
            known.known = ()
        if beat.node_id == self.node_id:
            first = (beat.age, beat.life) > (now - self.began, self.life)
            if not first or beat.leaving or beat.life in self._conflicts:
                return []
            self._conflicts.add(beat.life)
            return [Conflict(beat.node_id, beat.life, beat.endpoints)]
        if self.joined.get(beat.node_id) == beat.life and not beat.leaving:
            return [Heard(beat.node_id, beat.life, beat.payload)]
        return []

    def step(self, now: float) -> list[MemberEvent]:
        """What has changed by `now`. Call it after every change and when `due` says so."""
        events: list[MemberEvent] = []
        twice = self._twice()
        for node_id, life in list(self.joined.items()):
            if (reason := self._ended(node_id, life, node_id in twice, now)) is not None:
                del self.joined[node_id]
                if reason == "restarted":
                    # It would be the older of two otherwise, and come back.
                    self._lives[node_id, life].heard = float("-inf")
                events.append(Left(node_id, life, reason))
        for (node_id, life), known in sorted(self._lives.items(), key=lambda item: -self._age(item[1], now)):
            if node_id not in self.joined and node_id != self.node_id and known.alive(now) and known.token:
                assert known.beat is not None
                self.joined[node_id] = life
                events.append(Joined(node_id, life, known.beat.payload))
        for key, known in list(self._lives.items()):
            if not known.token and self.joined.get(key[0]) != key[1] and now - known.seen > FORGET:
                del self._lives[key]
        return events

    def due(self, now: float) -> float:
        """Seconds until `step` may find something although nothing was heard."""
        times, twice = [SILENT], self._twice()
        for node_id, life in self.joined.items():
            known = self._lives[node_id, life]
            times.append(known.heard + SILENT - now)
            if not known.token:
                times.append(known.lost - now)
            if node_id in twice and self._other(node_id, life, now):
                times.append(known.heard + RESTARTED - now)
        return max(0.01, min(times))

    def beats(self) -> dict[str, Heartbeat]:
        """The joined nodes' last heartbeats, by node id."""
        found = {node_id: self._lives[node_id, life].beat for node_id, life in self.joined.items()}
        return {node_id: beat for node_id, beat in found.items() if beat is not None}

    def beat_of(self, node_id: str) -> Heartbeat | None:
        """A joined node's last heartbeat."""
        life = self.joined.get(node_id)
        return self._lives[node_id, life].beat if life is not None else None

    def heard(self) -> dict[str, float]:
        """When each node that is there was heard last, on the clock of the other calls."""
        return {node_id: self._lives[node_id, life].heard for node_id, life in self.joined.items()}

    @property
    def digest(self) -> int:
        """Of this life and all that have joined."""
        return digest_of([(self.node_id, self.life), *self.joined.items()])

    def disagrees(self) -> bool:
        """Whether somebody who has joined sees others than this side does."""
        digest = self.digest
        beats = (self._lives[key].beat for key in self.joined.items())
        return any(beat is not None and beat.digest != digest for beat in beats)

    def unlinked(self, now: float) -> dict[Key, tuple[str, ...]]:
        """Lives that joined nodes see alive and this side does not, with their endpoints."""
        found: dict[Key, tuple[str, ...]] = {}
        for key in self.joined.items():
            witness = self._lives[key]
            for other in witness.known if now - witness.listed < LISTED else ():
                known = self._lives.get((other.node_id, other.life))
                if other.node_id != self.node_id and not (known and known.has_token(now)):
                    found[other.node_id, other.life] = other.endpoints
        return found

    def _ended(self, node_id: str, life: str, twice: bool, now: float) -> Reason | None:
        known = self._lives[node_id, life]
        if known.beat is not None and known.beat.leaving:
            return "closed"
        if twice and self._other(node_id, life, now) and (not known.token or now - known.heard >= RESTARTED):
            return "restarted"
        if not known.has_token(now):
            return "unreachable"
        return "silent" if now - known.heard >= SILENT else None

    def _twice(self) -> set[str]:
        """Nodes of which more than one life is known: in large clusters it pays not to look for others' of each."""
        lives = Counter(node_id for node_id, _ in self._lives)
        return {node_id for node_id, count in lives.items() if count > 1} if len(lives) < len(self._lives) else set()

    def _other(self, node_id: str, life: str, now: float) -> bool:
        return any(
            key[0] == node_id and key[1] != life and known.token and known.alive(now)
            for key, known in self._lives.items()
        )

    @staticmethod
    def _age(known: _Life, now: float) -> float:
        return known.beat.age + (now - known.heard) if known.beat is not None else 0.0
