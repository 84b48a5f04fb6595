"""What a source has, collected and checked before vLLM is told that it need not compute it.

vLLM takes a connector at its word: blocks are entered into its prefix cache before the connector fills them. So all
that can fail is done first, on numpy arrays, and filling blocks is nothing but copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engines.vllm.exchange import KEYS, VALUES, CacheLayer, Source
from tandem.errors import HandoffError
from tandem.kv.dtypes import DTYPES, Array, DTypeName


@dataclass(frozen=True)
class LoadedEntries:
    """Keys and values `[heads, tokens, dim]` of consecutive tokens."""

    start: int
    keys: Array
    values: Array


@dataclass(frozen=True)
class Prepared:
    """All that a request's blocks lack to have seen `end` tokens, when they have seen `start`.

    Attributes:
        entries, states: by leaf cache.
    """

    source: Source
    start: int
    end: int
    entries: dict[int, LoadedEntries]
    states: dict[int, list[Array]]


def prepare(source: Source, layers: Sequence[CacheLayer], held: int, prompt: int) -> Prepared | None:
    """Collect what is missing of a prompt of which vLLM holds `held` tokens.

    Returns:
        None if the source has nothing more than vLLM.

    Raises:
        HandoffError: what the source has does not go on from what vLLM holds, is not there, or does not fit.
    """
    end = source.length
    if end >= prompt:
        if any(layer.kind != "tokens" for layer in layers):
            raise HandoffError(f"States after {end} tokens cannot be used: one of the {prompt} has to be computed.")
        end = prompt - 1
    if end <= held:
        return None
    if source.start > held:
        raise HandoffError(f"Entries begin at token {source.start}, and vLLM holds only {held}.")
    entries, states = {}, {}
    for index, layer in enumerate(layers):
        if layer.kind == "state":
            states[index] = [
                _checked(source.state(index, number, end), state.shape, state.dtype, layer)
                for number, state in enumerate(layer.states)
            ]
            continue
        first = max(held, first_seen(layer.window, end))
        if first < end:
            keys, values = (
                _checked(source.entries(index, part, first, end), (layer.heads, end - first, dim), layer.dtype, layer)
                for part, dim in ((KEYS, layer.key_dim), (VALUES, layer.value_dim))
            )
            entries[index] = LoadedEntries(first, keys, values)
    return Prepared(source, held, end, entries, states)


def first_seen(window: int, token: int) -> int:
    """First token that `token` attends to, if a layer sees itself and `window - 1` others; all if that is 0."""
    return max(0, token - window + 1) if window else 0


def incomplete(prepared: Prepared, window: int, block_tokens: int, table: Sequence[int]) -> int | None:
    """The id of a block of which only the last tokens will be loaded, as the window begins within it.

    vLLM holds every block in which the request has passed the last token to be complete, and lets others begin with it.
    """
    first = first_seen(window, prepared.end)
    if first <= prepared.start or not first % block_tokens or first // block_tokens >= len(table):
        return None
    return table[first // block_tokens]


def _checked(array: Array, shape: tuple[int, ...], dtype: DTypeName, layer: CacheLayer) -> Array:
    if array.shape != shape or array.dtype != DTYPES[dtype].array:
        raise HandoffError(
            f"Layer {layer.name} takes {shape} of {dtype}, and not {array.shape} of {array.dtype} as the source has."
        )
    return array
