"""Model cards: the built-in ones, custom ones, and what is said of a broken one."""

from __future__ import annotations

import importlib
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.errors import ConfigError, NotFoundError
from tandem.models.cards import (
    CardStore,
    ModelCard,
    SamplingDefaults,
    SamplingValues,
    builtin_cards,
    file_name,
    format_card,
    parse_card,
)
from tandem.models.folder import SHARDABLE, card_from_config

MINIMAL = {"model_id": "org/x", "storage_size": 10, "n_layers": 2, "hidden_size": 8, "supports_tensor": False}
FULL = ModelCard(
    model_id="org/Full",
    storage_size=123,
    n_layers=2,
    hidden_size=8,
    supports_tensor=True,
    num_key_value_heads=2,
    family="f",
    quantization="4bit",
    base_model="Full",
    capabilities=("text", "thinking"),
    backends=("MlxCpu",),
    reasoning_dialect="channel",
    context_length=4096,
    is_custom=True,
    sampling_defaults=SamplingDefaults(temperature=0.5, non_thinking=SamplingValues(top_k=3)),
    aliases=("full", "Voll"),
)


@pytest.fixture
def cards(home: Path) -> CardStore:
    return CardStore(Settings(home=home))


def test_thirty_models_are_built_in() -> None:
    cards = builtin_cards()
    assert len(cards) >= 30
    families = {card.family for card in cards}
    assert {"smollm", "llama", "qwen", "gemma", "gpt-oss", "deepseek", "kimi", "glm", "mistral", "minimax"} <= families


def test_no_two_cards_share_a_name() -> None:
    names = [name.casefold() for card in builtin_cards() for name in {card.model_id, *card.aliases}]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("card", builtin_cards(), ids=lambda card: card.model_id)
def test_built_in_figures_are_plausible(card: ModelCard) -> None:
    assert "text" in card.capabilities
    assert card.context_length >= 8192
    assert card.num_key_value_heads
    assert card.base_model
    # Weights of a transformer: between 2 and 2,000 times layers x hidden^2 (dense to very sparse), at 4 to 32 bits.
    area = card.n_layers * card.hidden_size**2
    assert 2 * area * 0.5 < card.storage_size < 2000 * area * 4
    if card.quantization not in ("", "float32"):
        assert "Vllm" not in card.backends
    assert not card.is_custom


def test_a_cards_file_is_found_by_every_name(cards: CardStore) -> None:
    for card in builtin_cards():
        for name in (card.model_id, card.model_id.upper(), *card.aliases):
            assert cards.get(name) == card
    assert cards.get("demo") == cards.get("SmolLM2-135M-Instruct")
    assert cards.get("nothing like it") is None


def test_a_card_survives_being_written(cards: CardStore) -> None:
    assert parse_card(format_card(FULL), "x") == FULL
    for card in builtin_cards():
        assert parse_card(format_card(card), "x") == card


def test_exo_cards_can_be_read() -> None:
    text = """
    model_id = "org/x"
    n_layers = 24
    hidden_size = 2880
    num_key_value_heads = 8
    supports_tensor = true
    tasks = ["TextGeneration"]
    family = "gpt-oss"
    reasoning_dialect = "channel"
    backends = ["MlxMetal", "MlxCuda", "MlxCpu"]
    [storage_size]
    in_bytes = 12025908224
    [sampling_defaults]
    temperature = 1.0
    [sampling_defaults.non_thinking]
    top_k = 20
    """
    card = parse_card(text, "x")
    assert card.storage_size == 12025908224
    assert card.sampling_defaults == SamplingDefaults(temperature=1.0, non_thinking=SamplingValues(top_k=20))
    assert card.trust_remote_code is False


def test_custom_cards_are_kept_and_win(cards: CardStore, home: Path) -> None:
    kept = cards.add_custom(FULL.model_copy(update={"is_custom": False}))
    assert kept.is_custom
    again = CardStore(Settings(home=home))
    assert again.get("voll") == kept
    assert kept in again.all()
    own = ModelCard(**MINIMAL).model_copy(update={"model_id": "SMOLLM2-135m-instruct"})
    cards.add_custom(own)
    found = cards.get("SmolLM2-135M-Instruct")
    assert found is not None
    assert found.storage_size == 10
    assert len(cards.all()) == len(builtin_cards()) + 1
    cards.add_custom(own.model_copy(update={"storage_size": 11}))
    assert len(cards.custom()) == 2
    cards.remove_custom("smollm2-135m-instruct")
    builtin = cards.get("SmolLM2-135M-Instruct")
    assert builtin is not None
    assert not builtin.is_custom


def test_removing_what_is_not_custom_says_so(cards: CardStore) -> None:
    with pytest.raises(NotFoundError, match="built in"):
        cards.remove_custom("SmolLM2-135M-Instruct")
    with pytest.raises(NotFoundError, match="does not exist"):
        cards.remove_custom("nothing")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model_id = x\nn_layers = 1", ["bad.toml", "not valid TOML", "line 1"]),
        ('model_id = "x"', ["storage_size", "n_layers", "hidden_size", "supports_tensor", "Field required"]),
        ("n_layers = 0", ["n_layers", "greater than 0"]),
        ('storage_size = "big"', ["storage_size"]),
        ("storage_size = { bytes = 3 }", ["storage_size"]),
        ('colour = "red"', ["colour", "not permitted"]),
        ('backends = ["Cuda"]', ["backends.0", "MlxMetal"]),
        ('reasoning_dialect = "x"', ["reasoning_dialect"]),
        ("[sampling_defaults]\ntop_p = 2.0", ["sampling_defaults.top_p", "less than or equal to 1"]),
    ],
)
def test_a_bad_card_is_told_field_by_field(cards: CardStore, text: str, parts: list[str]) -> None:
    cards.folder.mkdir(parents=True)
    (cards.folder / "bad.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        cards.all()
    for part in parts:
        assert part in error.value.message
    assert "bad.toml" in error.value.message


def test_file_names_are_safe_and_distinct() -> None:
    names = ["a/b", "a--b", "a b", "../x", ".x", "~", "a/b/c", "ä", "a-b", "A/B", "a:b", "a\\b", "", "a/", "-", "--"]
    files = [file_name(name) for name in names if name]
    assert len(set(files)) == len(files)
    for file in files:
        assert "/" not in file
        assert not file.startswith(".")


def test_shardable_models_have_a_shard_method() -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    for model_type in SHARDABLE:
        module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
        assert hasattr(module.Model, "shard"), model_type


def test_a_card_from_a_config() -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "quantization": {"group_size": 64, "bits": 4},
    }
    card = card_from_config("mine", config, 99, "{% if tools %}{{ enable_thinking }}<think>")
    assert (card.n_layers, card.hidden_size, card.num_key_value_heads, card.context_length) == (3, 64, 2, 512)
    assert (card.quantization, card.storage_size, card.supports_tensor) == ("4bit", 99, True)
    assert card.capabilities == ("text", "thinking", "thinking_toggle", "tools")


def test_a_card_from_a_nested_config() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 3, "hidden_size": 64}}
    assert card_from_config("mine", config, 1, "").n_layers == 3


def test_built_in_files_are_named_after_their_model() -> None:
    for entry in (resources.files("tandem.models") / "data" / "cards").iterdir():
        if entry.name.endswith(".toml"):
            model_id = tomllib.loads(entry.read_text())["model_id"]
            assert entry.name == model_id.rpartition("/")[2] + ".toml"
