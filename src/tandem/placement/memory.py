"""What an instance takes of a node's memory, and what a node has to give. Bytes.

Estimates err upwards: a refusal can be overridden, a machine that swaps cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.models.cards import ModelCard
from tandem.placement.weights import loaded_bits, loaded_size, stored_bits
from tandem.placement.world import World, backend_of, card_of, on_accelerator
from tandem.types.facts import Backend, NodeFacts, Resources, RunnerFact
from tandem.types.intents import InstanceIntent, Shard

MIB = 1 << 20
GIB = 1 << 30
DEFAULT_CONTEXT = 8192
"""Tokens that cache is planned for where nobody says how many: engines grow their caches as prompts come."""

OVERHEAD: dict[Backend | None, int] = {
    "MlxCpu": 512 * MIB,
    "MlxMetal": 768 * MIB,
    "MlxCuda": 1 * GIB,
    "Vllm": 3 * GIB,
    None: 96 * MIB,
}
"""What a runner takes before it has a model, rounded up: its process and libraries, an accelerator's context, and for
vLLM on a GPU its captured graphs (not measured: no such GPU was at hand). None is the simulated engine."""
VLLM_CPU_OVERHEAD = 1280 * MIB
VLLM_CPU_CHUNK = 512
VLLM_SEQUENCES = 8
"""Requests that an instance answers at a time by default."""
VLLM_PADDING = 128 * (VLLM_SEQUENCES + 1)
"""Tokens of its cache that hold nothing: each request rounds up to a block, and one block is never used."""
PREFILL_CHUNK: dict[Backend | None, int] = {"MlxCpu": 256, "MlxMetal": 2048, "MlxCuda": 2048, "Vllm": 8192, None: 0}
"""Prompt tokens that are computed at once."""

SMALLEST_VOCABULARY = 32_000
LARGEST_VOCABULARY = 262_144
"""Cards do not say how many tokens a model knows. These bound the common ones: Llama 2's and Gemma 3's."""
HEAD_DIMS = {"gemma": 256, "glm": 128, "gpt-oss": 64, "llama": 128, "minimax": 128, "mistral": 128, "phi": 128}
HEAD_DIMS |= {"qwen": 128, "smollm": 128}
"""Largest width of one head, by family. Qwen models with 256 have caches in a quarter of their layers."""
LARGEST_HEAD_DIM = 256
LATENT_WIDTHS = {"deepseek": 576, "kimi": 576}
"""Families that cache one latent vector (512) and one rotated key (64) a token and layer instead of heads."""
RESERVE_SHARE = 0.05
LEAST_RESERVE = 512 * MIB
MOST_RESERVE = 4 * GIB
METAL_SHARE = 0.75
"""Of a Mac's memory, what macOS lets its GPU hold by default on most models."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one model takes with one engine, for one context length.

    Attributes:
        layers: of the model.
        weights: of the whole model on one node.
        layer_weights: of one layer; never less than its true size.
        table: the embeddings, or the output head, at most.
        layer_cache: keys and values of one layer for the whole context.
        divides_cache: tensor sharding splits the cache, too.
        fixed: activations and engine, on every node.
        tokens: that the cache has room for.
    """

    layers: int
    weights: int
    layer_weights: int
    table: int
    layer_cache: int
    divides_cache: bool
    fixed: int
    tokens: int

    @property
    def layer(self) -> int:
        """What one more layer takes."""
        return self.layer_weights + self.layer_cache

    @property
    def cache(self) -> int:
        """Keys and values of all layers for the whole context."""
        return self.layers * self.layer_cache

    @property
    def single(self) -> int:
        """On one node."""
        return self.weights + self.cache + self.fixed

    def pipeline(self, layers: int, *, first: bool, last: bool) -> int:
        """A stage of `layers`; the first one has the embeddings, the last one the output head."""
        if first and last:
            return self.single
        return layers * self.layer + self.table * (int(first) + int(last)) + self.fixed

    def tensor(self, world: int) -> int:
        """One of `world` ranks: a part of every layer, and both tables whole."""
        if world == 1:
            return self.single
        cache = self.layer_cache if not self.divides_cache else _share(self.layer_cache, world)
        return self.layers * (_share(self.layer_weights, world) + cache) + 2 * self.table + self.fixed


def footprint(
    card: ModelCard,
    backend: Backend | None,
    context_length: int,
    cache_elements: int | None = None,
    free: int | None = None,
    *,
    on_cpu: bool = False,
) -> Footprint:
    """What `card` takes with `backend`.

    Cache per token and layer: 2 (key and value) x heads x width of a head x bytes of an element (Kwon et al. 2023,
    "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 1). Windows and layers
    without a cache are not known here and count as full attention.

    Activations: 34 x tokens x hidden size at 2 bytes an element, of one layer at a time (Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models", section 4.1, without the attention matrix).

    Args:
        backend: None for the simulated engine.
        context_length: tokens that the cache is planned for; 0 for a default.
        cache_elements: numbers per token over all layers, where a running copy of the model has told.
        free: bytes that the node has free. A CPU widens quantised weights where it has room for that; None counts them
            as they are stored, which is the least.
        on_cpu: the engine computes on the processor; asked of vLLM alone, which has builds for both.
    """
    length = planned_context(card, context_length)
    cached = length + (VLLM_PADDING if backend == "Vllm" else 0)
    slow = backend == "MlxCpu" or (backend == "Vllm" and on_cpu)
    # MLX keeps float32 as it is, vLLM on a GPU does not.
    wide = slow or backend is None or (backend != "Vllm" and stored_bits(card) == 32)
    element = 4 if wide else 2
    weights = loaded_size(card, backend, free, on_cpu=on_cpu)
    latent = LATENT_WIDTHS.get(card.family)
    if cache_elements is not None:
        layer_elements = _share(cache_elements, card.n_layers)
    else:
        layer_elements = latent if latent is not None else 2 * _head_width(card)
    overhead, chunk = OVERHEAD[backend], PREFILL_CHUNK[backend]
    if backend == "Vllm" and on_cpu:
        overhead, chunk = VLLM_CPU_OVERHEAD, VLLM_CPU_CHUNK
    width = card.hidden_size * loaded_bits(card, backend, free, on_cpu=on_cpu) / 8
    least_table = min(int(SMALLEST_VOCABULARY * width), weights // 2)
    return Footprint(
        layers=card.n_layers,
        weights=weights,
        layer_weights=_share(weights - least_table, card.n_layers),
        table=min(int(LARGEST_VOCABULARY * width), weights),
        layer_cache=layer_elements * element * cached,
        divides_cache=latent is None,
        fixed=overhead + 17 * chunk * card.hidden_size * element,
        tokens=cached,
    )


def planned_context(card: ModelCard, context_length: int) -> int:
    """Tokens that cache is planned for."""
    return context_length or min(card.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _head_width(card: ModelCard) -> int:
    """Numbers in the keys of one token and layer: the heads' widths together."""
    if card.num_key_value_heads is None:
        return 2 * card.hidden_size
    return min(card.num_key_value_heads * HEAD_DIMS.get(card.family, LARGEST_HEAD_DIM), 2 * card.hidden_size)


def _share(size: int, parts: int) -> int:
    return -(-size // parts)


def known_cache_elements(world: World, model_id: str) -> int | None:
    """Numbers that one token takes in the cache, as a whole running copy of the model says; None if none does."""
    for node_id in sorted(world.nodes):
        for runner in world.nodes[node_id].runners:
            info = runner.info
            if runner.model_id != model_id or info is None or info.kv_bytes_per_token <= 0:
                continue
            instance = world.instances.get(runner.instance_id)
            if instance is not None and len(instance.shards) == 1:
                return _share(info.kv_bytes_per_token, 4 if info.dtype == "float32" else 2)
    return None


def uses_gpu_memory(backend: Backend | None, resources: Resources) -> bool:
    """Whether this engine's memory is a GPU's own, and not the machine's."""
    return backend in ("MlxCuda", "Vllm") and not resources.unified and bool(resources.accelerators)


def free_memory(facts: NodeFacts, backend: Backend | None) -> int | None:
    """What the node could give to one runner before promises, less a reserve for the system; None if it does not say.

    A runner uses one GPU: the freest counts, not their sum. A GPU that does not tell its memory is never taken to have
    the machine's.
    """
    resources = facts.resources
    if uses_gpu_memory(backend, resources):
        sizes = [
            (one.memory_available, one.memory_total or one.memory_available)
            for one in resources.accelerators
            if one.memory_available is not None
        ]
        if not sizes:
            return None
        available, total = max(sizes)
    else:
        available, total = resources.memory_available, resources.memory_total
        if total <= 0:
            return None
        if backend == "MlxMetal":
            available = min(available, int(total * METAL_SHARE))
    reserve = min(max(int(total * RESERVE_SHARE), LEAST_RESERVE), MOST_RESERVE)
    return max(0, available - reserve)


def outstanding(runner: RunnerFact, need: int = 0) -> int:
    """Bytes that a runner was promised and has not taken yet.

    What it has taken is missing from its node's free memory already. One that loads and does not tell counts in full.

    Args:
        need: what a loading runner's instance was planned to take; the runner tells its model's size alone.
    """
    if runner.state in ("failed", "stopped"):
        return 0
    taken = runner.load.active_memory if runner.load is not None else 0
    if runner.state == "ready" and taken == 0:
        return 0
    return max(0, max(runner.promised, need) - taken)


def shard_need(instance: InstanceIntent, shard: Shard, facts: NodeFacts) -> int:
    """What one shard of an instance takes on its node, which has not loaded it yet."""
    card = card_of(instance)
    if card is None:
        size = instance.card.get("storage_size")
        return size if isinstance(size, int) else 0
    length = instance.options.get("context_length")
    backend = backend_of(instance.meta, facts)
    free = facts.resources.memory_available if shard.world == 1 else None
    on_cpu = not on_accelerator(facts, backend)
    needs = footprint(card, backend, length if isinstance(length, int) else 0, free=free, on_cpu=on_cpu)
    granted = instance.options.get("cache_bytes")
    if backend == "Vllm" and shard.world == 1 and isinstance(granted, int) and granted > 0:
        return needs.single - needs.cache + granted
    if instance.sharding == "Tensor":
        return needs.tensor(shard.world)
    return needs.pipeline(
        shard.end_layer - shard.start_layer, first=shard.rank == 0, last=shard.rank == shard.world - 1
    )


@dataclass(slots=True)
class Availability:
    """What every node of a world can still give."""

    world: World
    _promised: Mapping[tuple[str, bool], int] | None = field(default=None, init=False)

    def available(self, facts: NodeFacts, backend: Backend | None) -> int | None:
        """Bytes for one more runner of `backend`; None if the node does not say what memory it has."""
        free = free_memory(facts, backend)
        if free is None:
            return None
        if self._promised is None:
            self._promised = promised(self.world)
        taken = self._promised.get((facts.node_id, uses_gpu_memory(backend, facts.resources)), 0)
        return max(0, free - taken)


def promised(world: World) -> dict[tuple[str, bool], int]:
    """Bytes promised and not taken yet, by node and by whether they are a GPU's own.

    Counts runners that load, and instances that were asked for and have no runner yet.
    """
    found: dict[tuple[str, bool], int] = {}

    def add(facts: NodeFacts, instance: InstanceIntent | None, size: int) -> None:
        if size <= 0:
            return
        backend = backend_of(instance.meta, facts) if instance is not None else None
        pools = {uses_gpu_memory(backend, facts.resources)} if instance is not None else {True, False}
        for pool in pools:
            found[facts.node_id, pool] = found.get((facts.node_id, pool), 0) + size

    needs: dict[tuple[str, str], int] = {}
    for instance in world.instances.values():
        for shard in instance.shards:
            node, runner = world.nodes.get(shard.node_id), world.runner(shard)
            if node is None or (runner is not None and runner.state in ("ready", "failed", "stopped")):
                continue
            need = shard_need(instance, shard, node)
            if runner is None:
                add(node, instance, need)
            else:
                needs[node.node_id, runner.runner_id] = need
    for facts in world.nodes.values():
        for runner in facts.runners:
            need = needs.get((facts.node_id, runner.runner_id), 0)
            add(facts, world.instances.get(runner.instance_id), outstanding(runner, need))
    return found
