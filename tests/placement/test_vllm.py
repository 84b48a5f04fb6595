"""Placing what vLLM runs."""

from __future__ import annotations

import msgspec
import pytest

from tandem.errors import PlacementError, UnplaceableError
from tandem.models.cards import ModelCard, builtin_cards
from tandem.models.quantisation import in_mlx_format, quantisation_of
from tandem.placement.memory import footprint, promised
from tandem.placement.overheads import GIB, VLLM_PADDING, VLLM_SEQUENCES
from tandem.placement.plan import PlacementRequest, place
from tandem.placement.planner import Plan, Planner
from tandem.placement.vllm import cache_grant, vllm_fault
from tandem.placement.world import on_accelerator
from tandem.types.facts import EngineFact, Resources

from .test_preview import show
from .worlds import GB, WHOLE, card, node, world

TOKEN = 2 * 8 * 128 * 2 * 32
"""Bytes of cache that a token of it takes in 16 bits."""


def gpu(number: int = 0, free: float = 100):
    return node(number, free, total=free, unified=False, vram=free, backends=("Vllm",))


def box(number: int = 0, free: float = 100):
    """A machine without a GPU."""
    return node(number, free, total=free, unified=False, backends=("MlxCpu", "Vllm"))


def request(model: ModelCard = WHOLE, **changes) -> PlacementRequest:
    return PlacementRequest(model, model.model_id, meta="Vllm", **changes)


def plan(facts, model: ModelCard = WHOLE, meta: str = "Vllm") -> Plan:
    found = Planner(model, world(facts)).attempt("Pipeline", meta, 1)  # type: ignore[arg-type]
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize(
    ("quantisation", "mlx"),
    [
        ("4bit", True),
        ("8bit", True),
        ("4bit-DWQ", True),
        ("MXFP4-Q8", True),
        ("3bit", True),
        ("bf16", False),
        ("", False),
    ]
    + [(name, False) for name in ("gptq-4bit", "awq-4bit", "fp8", "mxfp4", "float32", "compressed-tensors")],
)
def test_whose_format_a_quantisation_is(quantisation: str, mlx: bool) -> None:
    model = card(quantization=quantisation)
    assert in_mlx_format(model) == mlx
    fault = vllm_fault(model)
    assert (fault is not None) == mlx
    if fault:
        assert quantisation in fault
        assert "MlxRing" in fault


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, ""),
        ({"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}}, "4bit"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq-4bit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization": None, "quantization_config": None}, ""),
    ],
)
def test_a_config_names_its_quantisation(config: dict, name: str) -> None:
    assert quantisation_of(config) == name


@pytest.mark.parametrize("model", builtin_cards(), ids=lambda model: model.model_id)
def test_builtin_models_in_mlx_format_are_refused_by_name(model: ModelCard) -> None:
    if model.model_id.startswith("mlx-community/"):
        with pytest.raises(UnplaceableError, match="MLX's own format"):
            place(request(model), world(gpu(free=2000)), "i")
    else:
        assert vllm_fault(model) is None


def test_only_where_it_imports() -> None:
    reason = "vLLM is not installed: tandem engines install vllm"
    without = node(0, engines=(EngineFact("MlxMetal"), EngineFact("Vllm", available=False, reason=reason)))
    with pytest.raises(PlacementError, match="tandem engines install vllm"):
        place(request(), world(without), "i")
    there = place(request(), world(without, gpu(1)), "i")
    assert [shard.node_id for shard in there.shards] == ["n01"]
    assert there.meta == "Vllm"


def test_a_cache_is_granted_for_as_many_as_fit_and_no_more() -> None:
    roomy, tight = plan(gpu(free=1000)), plan(gpu(free=25))
    tokens = 8192 * VLLM_SEQUENCES + VLLM_PADDING
    assert roomy.cache_bytes == tokens * TOKEN
    assert roomy.needs[0] < 40 * GB
    assert TOKEN * (8192 + VLLM_PADDING) <= tight.cache_bytes < roomy.cache_bytes
    assert tight.needs[0] <= 25 * GB
    assert plan(gpu(free=1000), meta="Vllm").needs[0] - roomy.cache_bytes == footprint(WHOLE, "Vllm", 0).single - (
        TOKEN * (8192 + VLLM_PADDING)
    )
    with pytest.raises(PlacementError, match=r"needs 2\d\.\d GB"):
        place(request(), world(gpu(free=20)), "i")


def test_a_persons_wish_counts() -> None:
    intent = place(request(cache_bytes=2 * GIB, context_length=4096), world(gpu()), "i")
    assert intent.options == {"context_length": 4096, "cache_bytes": 2 * GIB}
    with pytest.raises(PlacementError):
        place(request(cache_bytes=500 * GIB), world(gpu()), "i")


def test_the_grant_is_in_the_intent_and_is_what_is_promised() -> None:
    facts = gpu()
    found = plan(facts)
    intent = place(request(), world(facts), "i")
    assert intent.options == {"cache_bytes": found.cache_bytes}
    assert promised(world(facts, instances=(intent,))) == {("n00", True): found.needs[0]}
    on_cpu = place(request(), world(box()), "i")
    assert promised(world(box(), instances=(on_cpu,))) == {("n00", False): plan(box()).needs[0]}


def test_mlx_is_granted_nothing() -> None:
    found = plan(box(), meta="MlxRing")
    assert found.cache_bytes == 0
    assert place(PlacementRequest(WHOLE, WHOLE.model_id), world(box()), "i").options == {}


def test_a_cpu_computes_in_float32_and_grants_less() -> None:
    needs = footprint(WHOLE, "Vllm", 0, on_cpu=True)
    assert needs.weights >= 2 * WHOLE.storage_size
    assert needs.cache == 2 * TOKEN * (8192 + VLLM_PADDING)
    assert cache_grant(needs, 1000 * GB, on_cpu=True) < cache_grant(needs, 1000 * GB)
    assert cache_grant(needs, 0, on_cpu=True) == needs.cache


def test_a_processor_is_no_accelerator() -> None:
    assert on_accelerator(gpu(), "Vllm")
    assert not on_accelerator(box(), "Vllm")
    spark = node(0, resources=Resources(memory_total=128 * GB, memory_available=100 * GB, unified=True))
    assert on_accelerator(spark, "Vllm")
    both = world(box(0, 500), gpu(1, 100))
    assert place(request(), both, "i").shards[0].node_id == "n01"


def test_several_nodes_are_planned_and_refused() -> None:
    there = world(gpu(0, 24), gpu(1, 24))
    large = card(model_id="org/Llama-13B", storage_size=26 * GB, n_layers=40, hidden_size=5120, quantization="bf16")
    assert place(request(large), there, "i").meta == "Vllm"
    with pytest.raises(UnplaceableError, match="Ray"):
        place(request(large), there, "i", launch=True)


def test_previews_show_it() -> None:
    found = [one for one in show(WHOLE, world(gpu())) if one.meta == "Vllm" and one.instance is not None]
    [one] = found
    assert one.memory_delta_by_node == {"n00": plan(gpu()).needs[0]}
    refused = [one for one in show(card(), world(gpu())) if one.meta == "Vllm"]
    assert all("MLX's own format" in (one.error or "") for one in refused)


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        (next(one for one in builtin_cards() if "demo" in one.aliases), 2013),
        (
            card(
                model_id="gemma-3-270m",
                family="gemma3_text",
                storage_size=1_072_000_000,
                n_layers=18,
                hidden_size=640,
                num_key_value_heads=1,
                quantization="float32",
            ),
            4460,
        ),
    ],
)
def test_what_was_measured_fits_into_what_is_planned(model: ModelCard, measured: int) -> None:
    """MiB in float32 on a processor with a cache of 512 MiB, two prompts of 400 tokens included."""
    needs = footprint(model, "Vllm", 0, on_cpu=True)
    planned = (needs.single - needs.cache >> 20) + 512
    assert measured <= planned <= 2 * measured


def test_a_node_whose_vllm_lies_says_so_in_its_facts() -> None:
    facts = msgspec.structs.replace(gpu(), engines=(EngineFact("Vllm", available=False, reason="libcuda.so.1"),))
    with pytest.raises(PlacementError, match=r"libcuda\.so\.1"):
        place(request(), world(facts), "i")
