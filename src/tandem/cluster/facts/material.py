"""Which changes are worth telling the cluster. An idle node should be silent. Pure."""

from __future__ import annotations

import msgspec

from tandem.types.description import EngineLoad
from tandem.types.facts import Accelerator, DownloadFact, LinkRate, NodeFacts, Resources, RunnerFact

MEMORY_SHARE = 0.01
"""Of the total: memory, swap, a GPU's memory."""
DISK_BYTES = 1_000_000_000
"""Of the disk; or 1 % of it, where that is less."""
USAGE = 0.1
"""Of a processor's or GPU's time."""
DEGREES = 3.0
WATTS = 5.0
POWER_SHARE = 0.1
"""Power counts when it changes by both this share and WATTS."""
PROGRESS_SHARE = 0.01
"""Of a download."""
RATE_SHARE = 0.1
"""Of measured speeds, and of the memory that an engine uses."""
ROUND_TRIP_SECONDS = 0.001
"""A link's round trip counts when it changes by both this and twice RATE_SHARE."""


def differs(old: NodeFacts, new: NodeFacts) -> bool:
    """Whether `new` says something that somebody who knows `old` should hear. Sequence numbers do not count."""
    rest_of_old = msgspec.structs.replace(old, sequence=0, resources=Resources(), runners=(), downloads=(), links=())
    rest_of_new = msgspec.structs.replace(new, sequence=0, resources=Resources(), runners=(), downloads=(), links=())
    return (
        rest_of_old != rest_of_new
        or resources_differ(old.resources, new.resources)
        or len(old.runners) != len(new.runners)
        or any(map(runners_differ, old.runners, new.runners))
        or len(old.downloads) != len(new.downloads)
        or any(map(downloads_differ, old.downloads, new.downloads))
        or len(old.links) != len(new.links)
        or any(map(links_differ, old.links, new.links))
    )


def resources_differ(old: Resources, new: Resources) -> bool:
    """By more than the thresholds; totals, and which figures there are, by anything."""
    if (old.memory_total, old.swap_total, old.disk_total, old.unified, len(old.accelerators)) != (
        new.memory_total,
        new.swap_total,
        new.disk_total,
        new.unified,
        len(new.accelerators),
    ):
        return True
    return (
        abs(old.memory_available - new.memory_available) > MEMORY_SHARE * new.memory_total
        or abs(old.swap_available - new.swap_available) > MEMORY_SHARE * new.swap_total
        or abs(old.disk_available - new.disk_available) > min(DISK_BYTES, MEMORY_SHARE * new.disk_total)
        or abs(old.cpu_usage - new.cpu_usage) >= USAGE
        or _by(old.temperature, new.temperature, DEGREES)
        or _power_differs(old.power, new.power)
        or any(map(accelerators_differ, old.accelerators, new.accelerators))
    )


def accelerators_differ(old: Accelerator, new: Accelerator) -> bool:
    """As `resources_differ`, for one GPU."""
    return (
        (old.name, old.memory_total) != (new.name, new.memory_total)
        or _by(old.memory_available, new.memory_available, MEMORY_SHARE * (new.memory_total or 0))
        or _by(old.usage, new.usage, USAGE)
        or _by(old.temperature, new.temperature, DEGREES)
        or _power_differs(old.power, new.power)
    )


def runners_differ(old: RunnerFact, new: RunnerFact) -> bool:
    """By anything but small changes of its load."""
    if msgspec.structs.replace(old, load=None) != msgspec.structs.replace(new, load=None):
        return True
    if old.load is None or new.load is None:
        return old.load is not new.load
    return loads_differ(old.load, new.load)


def loads_differ(old: EngineLoad, new: EngineLoad) -> bool:
    """Counts of requests by anything, memory and speeds by a share. `steps` grow all the time and never count."""
    if (old.waiting, old.prefilling, old.decoding) != (new.waiting, new.prefilling, new.decoding):
        return True
    return (
        _by_share(old.cache_bytes, new.cache_bytes)
        or _by_share(old.prefix_cache_bytes, new.prefix_cache_bytes)
        or _by_share(old.active_memory, new.active_memory)
        or _by_share(old.prefill_tps, new.prefill_tps)
        or _by_share(old.decode_tps, new.decode_tps)
    )


def downloads_differ(old: DownloadFact, new: DownloadFact) -> bool:
    """By its state, or by a hundredth of the model; a speed alone is no news."""
    same = msgspec.structs.replace(new, done=old.done, speed=old.speed)
    return old != same or abs(new.done - old.done) > PROGRESS_SHARE * new.total


def links_differ(old: LinkRate, new: LinkRate) -> bool:
    """Measured anew, and not just as before."""
    if (old.node_id, old.address) != (new.node_id, new.address):
        return True
    if old.bandwidth is None or new.bandwidth is None:
        return old.bandwidth is not new.bandwidth
    moved = abs(old.round_trip - new.round_trip)
    return _by_share(old.bandwidth, new.bandwidth) or moved > max(ROUND_TRIP_SECONDS, 2 * RATE_SHARE * old.round_trip)


def _by(old: float | None, new: float | None, threshold: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(old - new) >= threshold and old != new


def _by_share(old: float, new: float) -> bool:
    return abs(old - new) > RATE_SHARE * max(old, new)


def _power_differs(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(old - new) >= max(WATTS, POWER_SHARE * max(old, new))
