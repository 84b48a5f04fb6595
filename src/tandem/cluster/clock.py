"""The hybrid logical clock that stamps intents.

After Kulkarni and others, "Logical Physical Clocks and Consistent Snapshots in Globally Distributed Databases" (2014):
a stamp is the wall clock where that moves forward, and a counter where it does not, so that whoever has seen a stamp
makes only greater ones.

What a wrong wall clock does:

- Behind: the node goes on from the greatest stamp that it has seen. What it changes wins over all that it knew.
- Ahead: its stamps drag every clock that sees them along. Nodes then count until real time has caught up; nothing is
  refused, as nodes that refused different stamps would never agree.
- Jumping: back is counting, forward is being ahead.

In all cases a change made after another one was seen wins over it. Only changes that did not know of one another are
ordered by the wall clocks, and there a wrong one decides for the wrong side, but for the same side at every node.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from tandem.errors import StorageError
from tandem.types.intents import Stamp

LARGEST = 2**53 - 1
"""Largest wall and counter of any stamp: what JavaScript, too, holds exactly."""
_LATEST = 2**52
"""Wall clocks, and counters, that claim more are cut here: there is always room above."""
_SALTS = 2**32
_LONGEST_NODE_ID = 256


def wall_milliseconds() -> int:
    """Unix time in milliseconds, by this machine's clock."""
    return time.time_ns() // 1_000_000


def well_formed(stamp: Stamp) -> bool:
    """Whether a clock could have made it. The same answer at every node, so that leaving others out is safe."""
    numbers_fit = 0 <= stamp.wall <= LARGEST and 0 <= stamp.counter <= LARGEST
    return numbers_fit and 0 < len(stamp.node_id) <= _LONGEST_NODE_ID


class HybridClock:
    """Makes stamps that are greater than all it made or saw. For one thread.

    A process that dies may have sent stamps that it never wrote down. So that its next life cannot make them again for
    something else, each life starts counting at a random number; this also keeps apart two machines with a copied
    data folder, and so with one id.

    Args:
        last: the greatest stamp of this node's earlier lives.
        wall: unix milliseconds.
        salt: where this life starts to count; None for a random number.
    """

    def __init__(
        self,
        node_id: str,
        last: Stamp | None = None,
        *,
        wall: Callable[[], int] = wall_milliseconds,
        salt: int | None = None,
    ) -> None:
        self.node_id = node_id
        self._wall = wall
        self._salt = secrets.randbelow(_SALTS) if salt is None else salt
        self._last = last or Stamp(0, 0, node_id)
        self._ours = False

    @property
    def last(self) -> Stamp:
        """The greatest stamp made or seen."""
        return self._last

    def now(self) -> Stamp:
        """A stamp greater than every other that this clock made or saw.

        Raises:
            StorageError: a forged stamp took the last number there is.
        """
        wall = min(max(self._wall(), 0), _LATEST)
        if wall > self._last.wall:
            counter = self._salt
        else:
            wall = self._last.wall
            counter = self._last.counter + 1 + (0 if self._ours else self._salt)
            if counter > _LATEST:
                wall, counter = wall + 1, self._salt
        if wall > LARGEST:
            raise StorageError(
                "The cluster's logical clock stands at its end, which no clock reaches by itself. Stop all nodes, "
                "remove the folder 'intents' from every data folder, and start again."
            )
        self._last = Stamp(wall, counter, self.node_id)
        self._ours = True
        return self._last

    def observe(self, stamp: Stamp) -> None:
        """Make only greater stamps from now on."""
        if stamp > self._last:
            self._last = stamp
            self._ours = False
