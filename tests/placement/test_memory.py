"""What models take and nodes have."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.models.cards import builtin_cards
from tandem.placement.memory import (
    DEFAULT_CONTEXT,
    LEAST_RESERVE,
    Availability,
    footprint,
    free_memory,
    known_cache_elements,
    promised,
)
from tandem.placement.overheads import GIB
from tandem.placement.planner import Plan, Planner
from tandem.types.description import EngineLoad
from tandem.types.facts import Accelerator, Resources

from .worlds import GB, card, instance, node, runner, world


def test_the_cache_is_what_the_formula_says() -> None:
    needs = footprint(card(), "MlxMetal", 8192)
    assert needs.layer_cache * 32 == 2 * 8 * 128 * 2 * 32 * 8192 == 1 * GIB  # 128 KiB a token, as Llama 3.1 8B has
    assert footprint(card(), "MlxCpu", 8192).layer_cache == 2 * needs.layer_cache
    assert footprint(card(), "MlxMetal", 0).layer_cache == needs.layer_cache
    assert footprint(card(context_length=2048), "MlxMetal", 0).layer_cache == needs.layer_cache // 4
    assert needs.single == 4_500_000_000 + 1 * GIB + needs.fixed


def test_a_latent_cache_is_small_and_not_divided() -> None:
    model = next(one for one in builtin_cards() if one.model_id.endswith("DeepSeek-V3-0324-4bit"))
    needs = footprint(model, "MlxMetal", 1000)
    assert needs.layer_cache == 576 * 2 * 1000
    assert not needs.divides_cache
    assert needs.tensor(2) >= model.storage_size // 2 + needs.layer_cache * model.n_layers


@pytest.mark.parametrize("heads", [None, 8])
def test_an_unknown_family_counts_wide(heads: int | None) -> None:
    unknown = footprint(card(family="", num_key_value_heads=heads), "MlxMetal", 1000).layer_cache
    assert unknown >= 2 * footprint(card(), "MlxMetal", 1000).layer_cache


def test_a_running_copy_knows_better_than_the_card() -> None:
    ready = runner("i", info=msgspec.structs.replace(runner("i").info, kv_bytes_per_token=4096))
    there = world(node(0, runners=(ready,)), instances=(instance("i", "n00"),))
    assert known_cache_elements(there, "org/Llama-8B-4bit") == 2048
    assert known_cache_elements(there, "org/other") is None
    assert footprint(card(), "MlxMetal", 100, 2048).layer_cache * 32 == 4096 * 100


@pytest.mark.parametrize(
    ("quantisation", "free", "times"),
    [
        ("bf16", None, 2),
        ("", None, 2),
        ("float32", 1000 * GB, 1),
        # Widened where the engine finds room for eight times as much in half of what is free.
        ("4bit", 73 * GB, 8),
        ("4bit", 71 * GB, 1),
        ("4bit", None, 1),
        ("8bit", 73 * GB, 4),
        ("MXFP4-Q8", 73 * GB, 8),
    ],
)
def test_a_cpu_computes_in_float32(quantisation: str, free: int | None, times: int) -> None:
    model = card(quantization=quantisation)
    assert footprint(model, "MlxCpu", 0, free=free).weights == times * model.storage_size
    assert footprint(model, "MlxMetal", 0, free=free).weights == model.storage_size


def test_the_demo_model_is_planned_at_its_size() -> None:
    """The package's file becomes float32 as it is converted."""
    demo = next(one for one in builtin_cards() if "demo" in one.aliases)
    assert footprint(demo, "MlxCpu", 0).weights == demo.storage_size


def test_a_cpu_is_planned_with_what_it_will_load() -> None:
    roomy, tight = (node(0, free, backends=("MlxCpu",)) for free in (100, 60))
    for facts, least, most in ((roomy, 8, 9.5), (tight, 1, 3)):
        plan = Planner(card(), world(facts)).attempt("Pipeline", "MlxRing", 1)
        assert isinstance(plan, Plan)
        [need] = plan.needs
        assert least * card().storage_size <= need <= most * card().storage_size
        there = world(facts, instances=(instance("i", "n00"),))
        assert promised(there) == {("n00", False): need}


@pytest.mark.parametrize("model", builtin_cards(), ids=lambda model: model.model_id)
@pytest.mark.parametrize("backend", ["MlxMetal", "MlxCpu", "Vllm"])
def test_shards_together_are_never_less_than_the_whole(model, backend) -> None:
    needs = footprint(model, backend, 0)
    assert needs.pipeline(model.n_layers, first=True, last=True) == needs.single > model.storage_size
    half = model.n_layers // 2
    both = needs.pipeline(half, first=True, last=False) + needs.pipeline(model.n_layers - half, first=False, last=True)
    assert both >= needs.single
    assert 2 * needs.tensor(2) >= needs.single


def test_the_system_keeps_a_reserve() -> None:
    assert free_memory(node(0, 10, total=10), "MlxCpu") == 10 * GB - LEAST_RESERVE
    assert free_memory(node(0, 0.1, total=10), "MlxCpu") == 0
    assert free_memory(node(0, 500, total=512), "MlxCpu") == 500 * GB - 4 * GIB
    assert free_memory(node(0, 100, total=100), "MlxMetal") == 75 * GB - 4 * GIB
    assert free_memory(node(0, resources=Resources()), "MlxCpu") is None


def test_a_gpu_counts_by_its_own_memory() -> None:
    """Reported of exo: Linux nodes with CUDA counted the machine's memory."""
    box = node(0, 200, total=256, unified=False, vram=24, backends=("MlxCuda", "Vllm"))
    for backend in ("MlxCuda", "Vllm"):
        assert free_memory(box, backend) == 24 * GB - int(24 * GB * 0.05)
    assert free_memory(box, "MlxCpu") == 200 * GB - 4 * GIB
    mute = msgspec.structs.replace(box.resources, accelerators=(Accelerator("gpu"),))
    assert free_memory(msgspec.structs.replace(box, resources=mute), "Vllm") is None
    spark = node(0, 100, total=128, unified=True, vram=None, backends=("Vllm",))
    assert free_memory(spark, "Vllm") == 100 * GB - 4 * GIB


def test_two_gpus_are_not_one_large_one() -> None:
    two = (Accelerator("a", 24 * GB, 10 * GB), Accelerator("b", 24 * GB, 20 * GB))
    facts = node(0, resources=Resources(memory_total=64 * GB, memory_available=60 * GB, accelerators=two))
    assert free_memory(facts, "Vllm") == 20 * GB - int(24 * GB * 0.05)


def test_what_loads_is_promised() -> None:
    """exo's fault: an instance that still loads had promised nothing."""
    free = Availability(world(node(0))).available(node(0), "MlxMetal")
    assert free is not None
    for state, taken in (("loading", 9 * GB), ("restarting", 9 * GB), ("ready", 0), ("failed", 0), ("stopped", 0)):
        facts = node(0, runners=(runner("i", state, promised=9 * GB, load=None),))
        there = world(facts, instances=(instance("i", "n00"),))
        assert Availability(there).available(facts, "MlxMetal") == free - taken, state


@pytest.mark.parametrize("state", ["starting", "loading", "warming", "restarting"])
def test_a_loading_runner_is_promised_all_that_was_planned(state: str) -> None:
    """Itself it tells its model's size alone, without cache and engine: what was decided would shrink as it starts."""
    before = promised(world(node(0), instances=(instance("i", "n00"),)))
    facts = node(0, runners=(runner("i", state, promised=card().storage_size, load=None),))
    assert promised(world(facts, instances=(instance("i", "n00"),))) == before


def test_what_a_runner_has_taken_is_not_counted_twice() -> None:
    for state in ("loading", "ready"):
        facts = node(0, runners=(runner("i", state, promised=9 * GB, load=EngineLoad(active_memory=7 * GB)),))
        assert promised(world(facts, instances=(instance("i", "n00"),))) == {("n00", False): 2 * GB}


def test_an_instance_without_a_runner_is_promised_too() -> None:
    there = world(node(0), instances=(instance("i", "n00"),))
    assert promised(there) == {("n00", False): footprint(card(), "MlxMetal", 0).single}
    longer = world(node(0), instances=(instance("i", "n00", options={"context_length": 4 * DEFAULT_CONTEXT}),))
    assert promised(longer)["n00", False] > promised(there)["n00", False] + 2 * GIB
    unreadable = world(node(0), instances=(instance("i", "n00", card={"storage_size": 7, "n_layers": "many"}),))
    assert promised(unreadable) == {("n00", False): 7}


def test_a_gpus_memory_and_the_machines_are_promised_apart() -> None:
    box = node(0, 200, unified=False, vram=24, backends=("Vllm", "MlxCpu"))
    on_gpu = world(box, instances=(instance("i", "n00", meta="Vllm"),))
    assert {pool for _, pool in promised(on_gpu)} == {True}
    on_cpu = world(box, instances=(instance("i", "n00", meta="MlxRing"),))
    assert {pool for _, pool in promised(on_cpu)} == {False}
    stranger = world(msgspec.structs.replace(box, runners=(runner("i", "loading", promised=5, load=None),)))
    assert promised(stranger) == {("n00", True): 5, ("n00", False): 5}


@given(st.floats(0, 2000), st.floats(0, 2000), st.integers(0, 10**13))
def test_nothing_is_negative(free: float, total: float, size: int) -> None:
    facts = node(0, free, total=total, runners=(runner("i", "loading", promised=size, load=None),))
    available = Availability(world(facts)).available(facts, "MlxMetal")
    assert available is None or 0 <= available <= free * GB
