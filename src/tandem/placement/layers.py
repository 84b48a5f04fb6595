"""How a model's layers are split over nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.models.cards import ModelCard
from tandem.placement.memory import Footprint


def split_layers(layers: int, weights: Sequence[float], room: Sequence[int]) -> tuple[int, ...] | None:
    """Layers for each node: as near to the weights' proportions as everybody's limits permit.

    Node i gets `clamp(factor x weights[i], 1, room[i])` with the one factor at which these sum up to `layers`, rounded
    by largest remainder (ties: the earlier node). So what does not fit on one node goes to the others by weight.

    Args:
        weights: positive; only their proportions count.
        room: most layers that each node holds.

    Returns:
        Counts that sum up to `layers`, each between 1 and its room; None if there is no such split.
    """
    count = len(weights)
    if count == 0 or count > layers or min(room) < 1 or sum(room) < layers:
        return None
    scale = sum(weights)
    shares = [max(weight / scale, 1e-12) for weight in weights]
    factor = _factor(layers, shares, room)
    exact = [min(max(factor * share, 1.0), float(limit)) for share, limit in zip(shares, room, strict=True)]
    whole = [max(1, math.floor(value + 1e-9)) for value in exact]
    by_remainder = sorted(range(count), key=lambda index: (round(whole[index] - exact[index], 9), index))
    while sum(whole) != layers:
        step = 1 if sum(whole) < layers else -1
        order = by_remainder if step > 0 else by_remainder[::-1]
        for index in order:
            if sum(whole) != layers and 1 <= whole[index] + step <= room[index]:
                whole[index] += step
    return tuple(whole)


def _factor(layers: int, shares: Sequence[float], room: Sequence[int]) -> float:
    """The least x at which the sum of `clamp(x * share, 1, limit)` is `layers`.

    The sum is a broken line: it starts at one layer each; a node begins to rise at 1/share and stops at limit/share.
    """
    turns = [(1.0 / share, share) for share in shares]
    turns += [(limit / share, -share) for share, limit in zip(shares, room, strict=True)]
    turns.sort()
    total, slope, place = float(len(shares)), 0.0, 0.0
    for turn, change in turns:
        reached = total + slope * (turn - place)
        if reached >= layers and slope > 0:
            return place + (layers - total) / slope
        total, slope, place = reached, slope + change, turn
    return place


def pipeline_room(needs: Footprint, available: Sequence[int]) -> tuple[int, ...]:
    """Most layers that each node of a pipeline of two or more can hold, embeddings and output head counted."""
    last = len(available) - 1
    return tuple(
        max(0, (free - needs.fixed - needs.table * (int(rank == 0) + int(rank == last))) // needs.layer)
        for rank, free in enumerate(available)
    )


def speed_weights(available: Sequence[int], speeds: Sequence[float | None]) -> tuple[float, ...]:
    """Weight of each node: its memory times its measured speed; one that is not measured counts as average."""
    known = [speed for speed in speeds if speed is not None]
    average = sum(known) / len(known) if known else 1.0
    return tuple(
        max(1, free) * ((speed / average) if speed is not None else 1.0)
        for free, speed in zip(available, speeds, strict=True)
    )


def split_pipeline(
    needs: Footprint, available: Sequence[int], speeds: Sequence[float | None], *, ignore_memory: bool = False
) -> tuple[int, ...] | None:
    """Layers for each rank of a pipeline; None if the model does not fit.

    Args:
        available: bytes, in order of rank.
        speeds: see `world.node_speed`.
        ignore_memory: split by the same weights, whatever fits.
    """
    if len(available) == 1:
        return (needs.layers,) if ignore_memory or needs.single <= available[0] else None
    room = (needs.layers,) * len(available) if ignore_memory else pipeline_room(needs, available)
    return split_layers(needs.layers, speed_weights(available, speeds), room)


def ranges(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges, one after another."""
    found = []
    start = 0
    for count in counts:
        found.append((start, start + count))
        start += count
    return tuple(found)


def tensor_fault(card: ModelCard, world: int) -> str | None:
    """Why a model's layers cannot be split over `world` ranks; None if they can."""
    if not card.supports_tensor:
        return f"{card.model_id} cannot be split by tensors. Choose Pipeline."
    if card.num_key_value_heads is None:
        return f"The card of {card.model_id} does not say how many KV heads it has. Add num_key_value_heads to it."
    for name, value in (("KV heads", card.num_key_value_heads), ("hidden size", card.hidden_size)):
        if value % world:
            return (
                f"{card.model_id} cannot be split over {world} nodes by tensors: its {name} ({value}) is not a "
                f"multiple of {world}. Choose Pipeline or another number of nodes."
            )
    return None
