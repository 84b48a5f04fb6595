"""Where the engine and the connector inside vLLM meet: who wants a request's cache entries, and who has some.

vLLM makes the connector itself and passes it nothing but strings. So each loaded engine opens a `Registry`, names its
key in `kv_connector_extra_config` (`{"registry": key}`), and the connector finds it by that key. Everything here
happens in the engine's thread, inside vLLM's step, except `Registry.drop`, `tap` and `source`, which may be called by
any thread. Imports no vllm.

Arrays are numpy, `[heads, tokens, dim]`, in the numbering and order that mlx-lm's caches have: keys after their rotary
embedding and norm, halves rotated (NeoX), not scaled; states with a leading axis of one. bfloat16 comes and goes as its
2-byte pattern in `uint16`.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import EngineError, UnsupportedError
from tandem.kv.dtypes import Array, DTypeName
from tandem.kv.intervals import Span
from tandem.kv.layout import Kind

KEYS, VALUES = 0, 1
"""The parts of a *tokens* or *window* layer."""

_RANDOM_SUFFIX = re.compile("-[0-9a-f]{8}$")
"""What vLLM appends to the request ids that it is given."""


@dataclass(frozen=True)
class CacheState:
    """One array of a *state* layer. `shape` begins with an axis of one, as in mlx-lm."""

    name: str
    shape: tuple[int, ...]
    dtype: DTypeName


@dataclass(frozen=True)
class CacheLayer:
    """One leaf cache of the loaded model, in the model's order.

    Attributes:
        name: vLLM's name of the layer.
        heads, key_dim, value_dim, dtype: of the two parts of a *tokens* or *window* layer.
        window: tokens that a *window* layer attends to, the current one included; 0 for other kinds.
        states: of a *state* layer.
    """

    name: str
    kind: Kind
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: DTypeName = "float32"
    window: int = 0
    states: tuple[CacheState, ...] = ()


class Tap(Protocol):
    """Receives the cache entries of one request's prompt, those of `[start, prompt end)`, each exactly once.

    An exception that a method raises ends the tap: it is not called again, and vLLM's request goes on. A hand-off that
    was cancelled raises `CancelledError`.
    """

    def needs(self, layer: int, start: int, end: int) -> Sequence[Span]:
        """Which tokens of `[start, end)` are wanted of a layer; ascending, not touching."""

    def entries(self, layer: int, part: int, start: int, array: Array) -> None:
        """Entries of the tokens from `start` on. `part` is `KEYS` or `VALUES`; the array is the receiver's own."""

    def needs_state(self, layer: int, tokens: int) -> bool:
        """Whether a *state* layer's arrays as they are after `tokens` tokens are wanted. Asked at the ends of steps,
        which lie where vLLM's scheduler puts them; one of them is the prompt's end."""

    def state(self, layer: int, number: int, tokens: int, array: Array) -> None:
        """A state array as it is after `tokens` tokens; the array is the receiver's own."""

    def computed(self, tokens: int, cached: int) -> None:
        """After each step: `tokens` of the prompt are done and handed over, `cached` of them came from vLLM's prefix
        cache."""

    def failed(self, error: Exception) -> None:
        """Entries could not be read; the tap ends. Not called for an exception that the tap itself raised."""


class Source(Protocol):
    """Has cache entries of a prompt's tokens `[start, length)`, complete and checked; loading never waits for them.

    Tokens before `start` must be in vLLM's own prefix cache, or the source is not used. States and windows are those
    after `length` tokens. A source is used at most once for each time that vLLM starts the request (again after a
    preemption), so it stays registered until it is dropped.
    """

    @property
    def start(self) -> int:
        """First token that there are entries of."""

    @property
    def length(self) -> int:
        """Tokens of the prompt after which the cache is as the source has it; less than the prompt's length."""

    def entries(self, layer: int, part: int, start: int, end: int) -> Array:
        """Entries `[heads, end - start, dim]`. Of a *window* layer only the last `window` before `length` are asked.

        Raises:
            HandoffError: they are not there. vLLM computes the prompt instead.
        """

    def state(self, layer: int, number: int, tokens: int) -> Array:
        """A state array as it is after `tokens` tokens.

        Raises:
            HandoffError: it is not there. vLLM computes the prompt instead.
        """

    def loaded(self, start: int, end: int) -> None:
        """The entries of `[start, end)` are in vLLM's blocks now; what is before `start` vLLM had in its own cache."""

    def refused(self, reason: str) -> None:
        """Nothing was, or will be, used of it: vLLM computes the prompt."""


class Registry:
    """Taps and sources of one loaded engine, by vLLM's request id (the one given to `add_request`)."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._lock = threading.Lock()
        self._taps: dict[str, tuple[Tap, int]] = {}
        self._sources: dict[str, Source] = {}
        self._layers: tuple[CacheLayer, ...] = ()
        self._refusal: UnsupportedError | None = None

    def tap(self, request_id: str, tap: Tap, start: int) -> None:
        """Hand `tap` the entries of the prompt's tokens from `start` on. Call before the request is added to vLLM."""
        with self._lock:
            self._taps[request_id] = (tap, start)

    def source(self, request_id: str, source: Source) -> None:
        """Let the request begin with entries of `source`. Call before the request is added to vLLM."""
        with self._lock:
            self._sources[request_id] = source

    def drop(self, request_id: str) -> None:
        """Forget a request's tap and source. Harmless for one that has none."""
        with self._lock:
            self._taps.pop(request_id, None)
            self._sources.pop(request_id, None)

    def tap_of(self, internal_id: str) -> tuple[Tap, int] | None:
        """A request's tap and its first token, by the id that vLLM made of ours."""
        with self._lock:
            return self._taps.get(internal_id) or self._taps.get(_ours(internal_id))

    def source_of(self, internal_id: str) -> Source | None:
        """A request's source, by the id that vLLM made of ours."""
        with self._lock:
            return self._sources.get(internal_id) or self._sources.get(_ours(internal_id))

    def end_tap(self, internal_id: str) -> None:
        """Forget a request's tap, by the id that vLLM made of ours."""
        with self._lock:
            self._taps.pop(internal_id, None) or self._taps.pop(_ours(internal_id), None)

    def end_source(self, internal_id: str) -> None:
        """Forget a request's source, by the id that vLLM made of ours."""
        with self._lock:
            self._sources.pop(internal_id, None) or self._sources.pop(_ours(internal_id), None)

    @property
    def empty(self) -> bool:
        """Whether nobody wants or has anything."""
        with self._lock:
            return not self._taps and not self._sources

    def layers(self) -> tuple[CacheLayer, ...]:
        """The model's leaf caches; known once vLLM has made its cache.

        Raises:
            EngineError: it has not yet.
            UnsupportedError: the model's cache is of a kind that cannot be handed off; taps and sources are not used.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._layers:
            raise EngineError("vLLM has not made its cache yet. Ask for its layers once the model is loaded.")
        return self._layers

    def describe(self, layers: Sequence[CacheLayer]) -> None:
        """Called by the connector when vLLM has made its cache."""
        self._layers = tuple(layers)

    def refuse(self, error: UnsupportedError) -> None:
        """Called by the connector when it does not know the cache that vLLM has made."""
        self._refusal = error


def _ours(internal_id: str) -> str:
    return _RANDOM_SUFFIX.sub("", internal_id)


_registries: dict[str, Registry] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def open_registry() -> Registry:
    """A registry that a connector of this process can find by its key. Close it with the engine."""
    with _lock:
        registry = Registry(f"tandem-{next(_numbers)}")
        _registries[registry.key] = registry
    return registry


def find_registry(key: str) -> Registry:
    """The open registry with that key.

    Raises:
        EngineError: there is none.
    """
    with _lock:
        registry = _registries.get(key)
    if registry is None:
        raise EngineError(
            f"No engine of this process knows the hand-off registry {key!r}. The connector works only inside Tandem's "
            "runner, with VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    return registry


def close_registry(registry: Registry) -> None:
    """Forget it."""
    with _lock:
        _registries.pop(registry.key, None)
