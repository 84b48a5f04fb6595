"""A bounded queue that is fair between clients. Holds no lock: its owner does."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from tandem.errors import PrefillBusyError

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Higher priorities come first; among equals the clients take turns, each with its oldest item.

    Args:
        limit: items that may wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._turns: dict[int, deque[str]] = {}
        self._items: dict[tuple[int, str], deque[T]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._items.values())

    def put(self, client: str, item: T, *, priority: int = 0, wait: float = 0.0) -> None:
        """Add an item.

        Args:
            wait: seconds after which there may be room; told to who is turned away.

        Raises:
            PrefillBusyError: the queue is full.
        """
        if len(self) >= self.limit:
            raise PrefillBusyError(
                f"{self.limit} prefills are waiting already. Prefill elsewhere, or ask again.", retry_after=wait
            )
        key = (priority, client)
        if key not in self._items:
            self._items[key] = deque()
            self._turns.setdefault(priority, deque()).append(client)
        self._items[key].append(item)

    def get(self) -> T:
        """Take the next item.

        Raises:
            IndexError: there is none.
        """
        if not self._turns:
            raise IndexError("the queue is empty")
        priority = max(self._turns)
        client = self._turns[priority].popleft()
        items = self._items[priority, client]
        item = items.popleft()
        if items:
            self._turns[priority].append(client)
        else:
            self._forget(priority, client)
        return item

    def remove(self, item: T) -> bool:
        """Take out an item that is no longer wanted; False if it is not here."""
        for (priority, client), items in self._items.items():
            if item in items:
                items.remove(item)
                if not items:
                    self._turns[priority].remove(client)
                    self._forget(priority, client)
                return True
        return False

    def in_order(self) -> list[T]:
        """All items in the order in which `get` would give them now."""
        ordered: list[T] = []
        for priority in sorted(self._turns, reverse=True):
            lines = [list(self._items[priority, client]) for client in self._turns[priority]]
            for turn in range(max(len(line) for line in lines)):
                ordered.extend(line[turn] for line in lines if turn < len(line))
        return ordered

    def _forget(self, priority: int, client: str) -> None:
        del self._items[priority, client]
        if not self._turns[priority]:
            del self._turns[priority]
