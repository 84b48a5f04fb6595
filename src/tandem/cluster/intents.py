"""The intent map: entries by key, of which the newest wins.

Merging is commutative, associative and idempotent, so copies that have seen the same entries are equal, whatever the
order and however often.

Removed keys stay as tombstones for ever. Every rule that forgets them needs to know that no machine holds the removed
value any more, and nothing here knows that: machines sleep for months, ages are judged by clocks that may be wrong by
years, and a rule that drops what a returning machine alone holds would also drop what its user asked for while it was
alone. A tombstone takes some 120 bytes on disk, so ten thousand removals take a megabyte. To get rid of them, stop all
nodes and remove the folder `intents` from all but one node's data folder, and from that one's too if nothing should
stay. Whoever makes intents automatically gives them ids that follow from what they are for, so that a key is reused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tandem.cluster.clock import HybridClock, well_formed
from tandem.cluster.state import ClusterState
from tandem.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from tandem.types.intents import Entry, Intent, LinkIntent, key_of

BUCKETS = 256
"""Parts of the map that copies compare, by the first byte of the key's hash."""
LARGEST_ENTRY = 256 * 1024
"""Bytes of one entry as it travels."""
DIGEST_BYTES = 16

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Entry)
_UNREADABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises for values that cannot travel."""


def encode_entry(entry: Entry) -> bytes:
    """Bytes that are the same for equal entries, whatever the order of keys in their cards."""
    return _encoder.encode(entry)


def decode_entry(data: bytes | msgspec.Raw) -> Entry:
    """The entry in `data`.

    Raises:
        msgspec.MsgspecError: it is none, or one of a newer version.
    """
    return _decoder.decode(data)


def _rank(entry: Entry) -> tuple[int, bytes]:
    """Decides between entries of one stamp, which only a fault makes: an older version may have cut the shorter one."""
    encoded = encode_entry(entry)
    return len(encoded), encoded


class IntentMap:
    """One node's copy. For one thread.

    Args:
        clock: stamps local changes, and learns from merged ones.
        entries: what to begin with.

    Attributes:
        refused: entries left out by `merge`, as no version of this map can have made them.
    """

    def __init__(self, clock: HybridClock, entries: Iterable[Entry] = ()) -> None:
        self.clock = clock
        self.refused = 0
        self._entries: list[dict[str, Entry]] = [{} for _ in range(BUCKETS)]
        self._hashes: dict[str, int] = {}
        self._sums = [0] * BUCKETS
        self._sum = 0
        self.merge(entries)

    def __len__(self) -> int:
        return len(self._hashes)

    def __iter__(self) -> Iterator[Entry]:
        for bucket in self._entries:
            yield from bucket.values()

    @property
    def entries(self) -> dict[str, Entry]:
        """A copy, by key, tombstones included."""
        return {entry.key: entry for entry in self}

    def get(self, key: str) -> Entry | None:
        """What is known of `key`; a tombstone if it was removed."""
        return self._entries[_bucket(key)].get(key)

    def put(self, intent: Intent) -> Entry:
        """Add or replace. Wins over everything this node knows of the key.

        Returns:
            The entry as other nodes will see it: what msgpack has no form for is turned into what it has.

        Raises:
            InvalidRequestError: the card or the options hold something that cannot travel.
            PayloadTooLargeError: the entry takes more than `LARGEST_ENTRY` bytes.
        """
        try:
            # Through bytes, so that a caller's later change of a card changes nothing here.
            plain = encode_entry(Entry(key_of(intent), intent, self.clock.last))
            value = decode_entry(plain).value
        except _UNREADABLE as error:
            raise InvalidRequestError(
                f"'{key_of(intent)}' cannot be sent to other nodes: {error}. Use text, numbers, lists and tables only."
            ) from error
        if len(plain) > LARGEST_ENTRY - 1024:  # room for a longer stamp
            raise PayloadTooLargeError(
                f"'{key_of(intent)}' takes {len(plain)} bytes; {LARGEST_ENTRY - 1024} are allowed. Shorten its card."
            )
        entry = Entry(key_of(intent), value, self.clock.now())
        self._set(entry, encode_entry(entry))
        return entry

    def remove(self, key: str) -> Entry:
        """Replace a value by a tombstone.

        Raises:
            NotFoundError: there is no such value here, or it was removed before.
        """
        known = self.get(key)
        if known is None or known.value is None:
            kind, _, name = key.partition("/")
            raise NotFoundError(f"There is no {kind} '{name}'. It may have been removed already.")
        entry = Entry(key, None, self.clock.now())
        self._set(entry, encode_entry(entry))
        return entry

    def merge(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take what is newer. Entries that break the form are counted and left out, at every node alike.

        Returns:
            The entries that changed something, one for a key.
        """
        changed: dict[str, Entry] = {}
        for entry in entries:
            try:
                encoded = encode_entry(entry)
            except _UNREADABLE:
                self.refused += 1
                continue
            fits = entry.value is None or key_of(entry.value) == entry.key
            if not fits or not well_formed(entry.stamp) or len(encoded) > LARGEST_ENTRY:
                self.refused += 1
                continue
            # Also those that lose: what this node does next was done with knowledge of them.
            self.clock.observe(entry.stamp)
            known = self.get(entry.key)
            if known is not None:
                if entry.stamp < known.stamp:
                    continue
                if entry.stamp == known.stamp and (len(encoded), encoded) <= _rank(known):
                    continue
            self._set(entry, encoded)
            changed[entry.key] = entry
        return list(changed.values())

    def digest(self) -> bytes:
        """16 bytes: equal for two maps exactly if they hold the same entries. Kept current, so asking costs nothing."""
        return self._sum.to_bytes(DIGEST_BYTES, "big")

    def bucket_digests(self) -> tuple[bytes, ...]:
        """`BUCKETS` digests, each of one part of the map."""
        return tuple(value.to_bytes(DIGEST_BYTES, "big") for value in self._sums)

    def differing(self, digests: Sequence[bytes]) -> list[int]:
        """Buckets whose digests are others than those of a copy."""
        own = self.bucket_digests()
        return [index for index, digest in enumerate(digests) if index < BUCKETS and digest != own[index]]

    def bucket(self, index: int) -> list[Entry]:
        """The entries of one bucket, in no order."""
        return list(self._entries[index].values())

    def _set(self, entry: Entry, encoded: bytes) -> None:
        # The xor of hashes does not depend on the order, and a hash is taken out by adding it again.
        index = _bucket(entry.key)
        new = int.from_bytes(hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest(), "big")
        change = new ^ self._hashes.get(entry.key, 0)
        self._sum ^= change
        self._sums[index] ^= change
        self._hashes[entry.key] = new
        self._entries[index][entry.key] = entry


def _bucket(key: str) -> int:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0]


def effective_links(state: ClusterState) -> dict[str, LinkIntent]:
    """Links by id, without instances that are not there; a link that lacks a side is left out.

    This is what removing an instance does to links. It is derived at each node instead of written into the map: then
    nodes that saw the removal at different times have nothing to disagree about, and a link that arrives before its
    instances takes effect when they do.
    """
    return trimmed_links(state.links, state.instances)


def trimmed_links(links: Mapping[str, LinkIntent], instances: Iterable[str]) -> dict[str, LinkIntent]:
    """`links` by id, reduced to `instances`; see `effective_links`."""
    there = set(instances)
    trimmed = {}
    for link_id in sorted(links):
        link = links[link_id]
        prefill = tuple(name for name in link.prefill_instances if name in there)
        decode = tuple(name for name in link.decode_instances if name in there)
        if prefill and decode:
            trimmed[link_id] = msgspec.structs.replace(link, prefill_instances=prefill, decode_instances=decode)
    return trimmed
