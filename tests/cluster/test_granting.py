"""What a node that is told to run a model with vLLM grants it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.cluster.granting import with_options
from tandem.cluster.instances import LocalInstances
from tandem.cluster.reconciler import instance_here
from tandem.config import Settings
from tandem.errors import ConfigError, UnplaceableError
from tandem.models.inventory import LocalModel
from tandem.placement.plan import PlacementRequest, place
from tests.placement.worlds import WHOLE, card, instance, node, world

BOX = node(0, 100, total=100, unified=False, backends=("MlxCpu", "Vllm"))


def intent(model=WHOLE, **changes):
    return msgspec.structs.replace(instance("i", "n00", model), meta="Vllm", **changes)


def test_as_the_planner_would() -> None:
    there = world(BOX)
    planned = place(PlacementRequest(WHOLE, WHOLE.model_id, meta="Vllm"), there, "i")
    assert with_options(intent(), there, Settings()).options == planned.options


def test_the_nodes_context_and_a_persons_wish_count() -> None:
    there = world(BOX)
    usual = with_options(intent(), there, Settings()).options["cache_bytes"]
    short = with_options(intent(), there, Settings(context_length=512)).options
    assert set(short) == {"cache_bytes"}
    assert 0 < short["cache_bytes"] < usual
    assert with_options(intent(), there, Settings(), {"cache_bytes": 7}).options == {"cache_bytes": 7}


def test_a_node_without_facts_grants_what_one_request_needs() -> None:
    alone = with_options(intent(), world(), Settings()).options["cache_bytes"]
    assert 0 < alone < with_options(intent(), world(BOX), Settings()).options["cache_bytes"]


def test_other_engines_are_granted_nothing_and_mlx_format_is_refused() -> None:
    assert with_options(instance("i", "n00"), world(BOX), Settings(), {"dtype": "float32"}).options == {
        "dtype": "float32"
    }
    with pytest.raises(UnplaceableError, match="MLX's own format"):
        with_options(intent(card()), world(BOX), Settings())


def test_the_engine_is_in_the_intent(tmp_path: Path) -> None:
    model = LocalModel("org/Llama-8B", tmp_path, "folder", WHOLE, 1)
    assert instance_here("n", model, "i", "vllm").meta == "Vllm"
    assert instance_here("n", model, "i").meta == "MlxRing"
    assert instance_here("n", "sim", "i", "vllm").meta == "Sim"


@pytest.mark.anyio
async def test_an_engine_that_is_not_installed_is_refused_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    here = LocalInstances(Settings(home=tmp_path), "n")
    with pytest.raises(ConfigError, match="tandem engines install vllm"):
        here.launch(LocalModel("org/Llama-8B", tmp_path, "folder", WHOLE, 1), engine="vllm")
    assert len(here) == 0
