"""The connector's side that touches tensors: reads the cache while a step runs, and fills blocks before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from tandem.engines.vllm.cache_layout import CacheLayout, EntryLayer, StateLayer, describe, to_numpy
from tandem.engines.vllm.copies import Copies, copies_for
from tandem.engines.vllm.exchange import KEYS, VALUES, Registry
from tandem.engines.vllm.steps import StepLoad, StepRead, held_spans
from tandem.errors import CancelledError, UnsupportedError

_Answer = TypeVar("_Answer")
logger = logging.getLogger("tandem.vllm")


class CacheWorker:
    """Does the steps' work on one loaded model's cache.

    A layer's entries are read once it has written them. vLLM says so for attention layers; what it says nothing about
    is read when the step ends.
    """

    def __init__(self, registry: Registry, layout: CacheLayout, copies: Copies) -> None:
        self._registry = registry
        self._layout = layout
        self._copies = copies
        self._numbers = {leaf.layer.name: number for number, leaf in enumerate(layout.leaves)}
        self._reads: list[StepRead] = []
        self._ended: set[str] = set()
        self._unread: set[int] = set()

    @classmethod
    def of(
        cls,
        registry: Registry,
        config: KVCacheConfig,
        tensors: Mapping[str, torch.Tensor],
        modules: Mapping[str, Any],
    ) -> CacheWorker | None:
        """For the cache that vLLM has made; None, and a word in the registry, if it is none that is known."""
        try:
            layout = describe(config, tensors, modules)
        except UnsupportedError as error:
            logger.warning("no hand-off with this model: %s", error.message)
            registry.refuse(error)
            return None
        registry.describe(layout.layers)
        return cls(registry, layout, copies_for(next(iter(tensors.values())).device))

    def begin(self, reads: list[StepRead]) -> None:
        """Before the step: what is to be read in it."""
        self._reads = reads
        self._ended.clear()
        self._unread = set(range(len(self._layout.leaves)))

    def load(self, loads: list[StepLoad]) -> None:
        """Before the model computes: fill blocks."""
        for one in loads:
            self._load(one)

    def layer_written(self, name: str) -> None:
        """In the step: a layer's new entries are in its blocks."""
        number = self._numbers.get(name)
        if number is None or number not in self._unread:
            return
        leaf = self._layout.leaves[number]
        if isinstance(leaf, EntryLayer):
            self._unread.discard(number)
            self._read_entries(number, leaf)
            self._copies.poll()

    def finish(self) -> None:
        """After the step: read what is left, and wait until all is handed over."""
        for number in sorted(self._unread):
            leaf = self._layout.leaves[number]
            if isinstance(leaf, EntryLayer):
                self._read_entries(number, leaf)
            else:
                self._read_states(number, leaf)
        self._unread.clear()
        self._copies.finish()
        for read in self._reads:
            self._ask(read, partial(read.tap.computed, read.end, read.cached))
        self._reads = []

    def _load(self, load: StepLoad) -> None:
        prepared = load.prepared
        for number, entries in prepared.entries.items():
            leaf = self._layout.leaves[number]
            assert isinstance(leaf, EntryLayer)
            leaf.scatter(load.tables[leaf.group], entries.start, entries.keys, entries.values)
        for number, arrays in prepared.states.items():
            state = self._layout.leaves[number]
            assert isinstance(state, StateLayer)
            table = load.tables[state.group]
            # vLLM goes on from the block of the last token seen. Where it starts a new block in this step, it has
            # copied the state there already, before it was here.
            for token in {prepared.end - 1, load.end - 1}:
                state.write(table[token // state.block_tokens], arrays)
        prepared.source.loaded(prepared.start, prepared.end)

    def _read_entries(self, number: int, leaf: EntryLayer) -> None:
        for read in self._reads:
            wanted = self._ask(read, partial(read.tap.needs, number, read.start, read.end)) or ()
            table = read.tables[leaf.group]
            for span in held_spans(table, leaf.block_tokens, wanted):
                self._copy(
                    read,
                    partial(leaf.gather, table, span.start, span.end),
                    partial(read.tap.entries, number),
                    [(part, span.start) for part in (KEYS, VALUES)],
                )

    def _read_states(self, number: int, leaf: StateLayer) -> None:
        for read in self._reads:
            if self._ask(read, partial(read.tap.needs_state, number, read.end)):
                block = read.tables[leaf.group][(read.end - 1) // leaf.block_tokens]
                self._copy(
                    read,
                    partial(leaf.read, block),
                    partial(read.tap.state, number),
                    [(array, read.end) for array in range(len(leaf.layer.states))],
                )

    def _copy(
        self,
        read: StepRead,
        gather: Callable[[], Any],
        give: Callable[..., None],
        places: list[tuple[int, int]],
    ) -> None:
        def arrived(tensors: list[torch.Tensor]) -> None:
            for place, tensor in zip(places, tensors, strict=True):
                self._ask(read, partial(give, *place, to_numpy(tensor)))

        if read.request in self._ended:
            return
        try:
            self._copies.start(gather, arrived)
        except Exception as error:  # of one prompt; the others must not suffer
            logger.exception("cache entries could not be read")
            self._ask(read, partial(read.tap.failed, error))
            self._end(read)

    def _ask(self, read: StepRead, call: Callable[[], _Answer]) -> _Answer | None:
        """Call a tap, unless it has ended. Whatever it raises ends it."""
        if read.request in self._ended:
            return None
        try:
            return call()
        except CancelledError:
            self._end(read)
        except Exception:  # of one prompt; the others must not suffer
            logger.exception("a hand-off has ended")
            self._end(read)
        return None

    def _end(self, read: StepRead) -> None:
        self._ended.add(read.request)
        self._registry.end_tap(read.request)
