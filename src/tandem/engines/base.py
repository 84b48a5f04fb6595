"""The contract between a runner and an engine.

An engine lives in a runner subprocess. Its methods are called from one thread, the engine thread, except `prepare`,
which runs on worker threads so that tokenising a long prompt never delays a running answer.

A request's life: `prepare` (template, tokens, constraint; raises for bad input) -> `submit` -> any number of `step`s
that return events -> one `Finished` or `Failure` event, or `cancel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from tandem.errors import UnsupportedError
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.job import Producer
from tandem.kv.layout import Layout
from tandem.types import EngineLoad, Event, GenerationRequest, ModelInfo

EngineName: TypeAlias = Literal["mlx", "vllm", "sim"]


class LoadProgress(NamedTuple):
    """`done` of `total` layers are in memory."""

    done: int
    total: int


class Output(NamedTuple):
    """Events of one request, in order."""

    request_id: str
    events: list[Event]


class PrefillPort(msgspec.Struct, frozen=True):
    """A KV port that may prefill for an instance.

    Attributes:
        address: `host:port`.
        allow_quantisation: its model may have the same weights in another quantisation, as a link permits.
    """

    address: str
    allow_quantisation: bool = False


class EngineOptions(msgspec.Struct, frozen=True):
    """Everything an engine needs to know before it loads a model.

    Attributes:
        path: folder in Hugging Face layout; empty for `sim`.
        max_batch: sequences decoded together.
        prefill_chunk: prompt tokens per step; 0 lets the engine choose.
        max_decode_stall: seconds that one prefill step may delay running answers.
        prefix_cache_bytes: budget of the prefix cache; -1 lets the engine choose, 0 means none.
        kv_bits: 0, 4 or 8.
        context_length: cap on prompt plus answer; 0 for the model's own.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        cache_bytes: memory for caches that placement set aside; 0 lets the engine choose. `vllm` only.
        sampling_defaults: the model card's values for unset sampling fields.
        profile: speeds and faults of the `sim` engine.
        prefill_peers: KV ports that may prefill for this instance, each address once.
        kv_codec: how entries are sent to this instance: a codec's name, or `auto`.
        kv_host, kv_port: where this instance's own KV port listens; port -1 for none, 0 for a free one.
        cluster_secret: shared by all nodes; empty for none.
        cluster_open: other machines may be spoken to without a secret.
        node_id: this node's name in certificates.
    """

    engine: EngineName
    model_id: str
    path: str = ""
    max_batch: int = 8
    prefill_chunk: int = 0
    max_decode_stall: float = 0.5
    prefix_cache_bytes: int = -1
    kv_bits: int = 0
    context_length: int = 0
    dtype: str = "auto"
    cache_bytes: int = 0
    sampling_defaults: dict[str, Any] = {}
    profile: dict[str, Any] = {}
    prefill_peers: tuple[PrefillPort, ...] = ()
    kv_codec: str = "raw"
    kv_host: str = "127.0.0.1"
    kv_port: int = -1
    cluster_secret: str = ""
    cluster_open: bool = False
    node_id: str = ""

    @property
    def folder(self) -> Path:
        """`path` as a path."""
        return Path(self.path)


class KvPlane(NamedTuple):
    """What a KV port needs of an engine that can prefill for others.

    Attributes:
        checkpoints: whether it has windows and states of points before a prompt's end.
    """

    layout: Layout
    fingerprint: Fingerprint
    producer: Producer
    checkpoints: bool = True


class Prepared(ABC):
    """A request after `Engine.prepare`. Engines subclass it; a runner only needs its id."""

    request_id: str


class Engine(ABC):
    """One loaded model, able to work on several requests at a time.

    Attributes:
        wake: set by the runner; the engine's own threads call it when `has_work` may have become true.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def load(self, report: Callable[[LoadProgress], None]) -> ModelInfo:
        """Load the model.

        Raises:
            ModelError: the files are missing, damaged or of an unknown kind.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Run one tiny request, so that the first real one pays for no compilation, and a broken model shows now."""

    @abstractmethod
    def prepare(self, request_id: str, request: GenerationRequest) -> Prepared:
        """Turn a request into tokens and samplers. Thread-safe; touches no engine state.

        Raises:
            InvalidRequestError: the template refuses the messages, the prompt is too long, the schema is unusable.
        """

    @abstractmethod
    def submit(self, prepared: Prepared) -> None:
        """Queue a prepared request. Its first event comes from a later `step`."""

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """Forget a request at once: no event follows. False if it is unknown (finished already)."""

    @abstractmethod
    def step(self) -> list[Output]:
        """Do one unit of work: at most one decode step for the running requests and one prefill chunk.

        A failure that belongs to one request becomes that request's `Failure`. An exception means that the whole
        engine is broken.
        """

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    @abstractmethod
    def load_now(self) -> EngineLoad:
        """How busy the engine is. Callable from any thread."""

    def kv_plane(self) -> KvPlane | None:
        """What other nodes need to have prompts prefilled here; None if this engine cannot do that."""
        return None

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        """From now on these KV ports may prefill for this instance.

        Raises:
            ConfigError: an address cannot be used.
            UnsupportedError: this engine cannot have prompts prefilled elsewhere.
        """
        if peers:
            raise UnsupportedError("This engine cannot have prompts prefilled elsewhere. Remove its prefill peers.")

    @abstractmethod
    def close(self) -> None:
        """Give up threads and memory."""
