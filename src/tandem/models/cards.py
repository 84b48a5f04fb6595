"""Model cards: what Tandem knows of a model before any of its weights are here.

Cards are TOML files. The built-in ones lie in `data/cards`, custom ones in the settings' `cards_dir`, where they win
over a built-in card of the same id.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tandem.config import Settings
from tandem.errors import ConfigError, NotFoundError

Capability = Literal["text", "thinking", "thinking_toggle", "tools", "vision", "code"]
Backend = Literal["MlxMetal", "MlxCuda", "MlxCpu", "Vllm"]
ALL_BACKENDS: tuple[Backend, ...] = ("MlxMetal", "MlxCuda", "MlxCpu", "Vllm")


def _bytes(value: Any) -> Any:
    """`storage_size = { in_bytes = 1 }`, as other tools write it, means `storage_size = 1`."""
    return value["in_bytes"] if isinstance(value, dict) and set(value) == {"in_bytes"} else value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SamplingValues(_Frozen):
    """Sampling parameters; None leaves one to the model's own default."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class SamplingDefaults(SamplingValues):
    """What the model's makers recommend; `thinking` and `non_thinking` override it in that mode."""

    thinking: SamplingValues | None = None
    non_thinking: SamplingValues | None = None


class Vision(_Frozen):
    """How a model takes images."""

    image_token_id: int
    model_type: str
    weights_repo: str | None = None
    image_token: str | None = None
    processor_repo: str | None = None


class ModelCard(_Frozen):
    """One model.

    Attributes:
        model_id: what requests name: a hub repository id, or a name of its own for a local model.
        storage_size: bytes of its weights.
        supports_tensor: its layers can be split across machines.
        tasks: what it does.
        family, quantization, base_model: for people, and for grouping.
        capabilities: what a request may ask of it.
        backends: engines that run it.
        reasoning_dialect: how the template treats earlier reasoning.
        context_length: tokens of prompt plus answer.
        trust_remote_code: the model's repository brings code that would have to be executed.
        is_custom: added by a user.
        aliases: other names for it, compared without regard to case.
    """

    model_id: str = Field(min_length=1)
    storage_size: Annotated[int, BeforeValidator(_bytes)] = Field(gt=0)
    n_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    supports_tensor: bool
    num_key_value_heads: int | None = Field(None, gt=0)
    tasks: tuple[Literal["TextGeneration", "TextToImage", "ImageToImage"], ...] = ("TextGeneration",)
    family: str = ""
    quantization: str = ""
    base_model: str = ""
    capabilities: tuple[Capability, ...] = ("text",)
    backends: tuple[Backend, ...] = ALL_BACKENDS
    reasoning_dialect: Literal["none", "post_last_user", "suffix", "channel", "tool_conditional"] = "none"
    context_length: int = Field(0, ge=0)
    trust_remote_code: bool = False
    is_custom: bool = False
    vision: Vision | None = None
    sampling_defaults: SamplingDefaults | None = None
    aliases: tuple[str, ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """Everything that requests may call it, case-folded."""
        return frozenset(name.casefold() for name in (self.model_id, *self.aliases))


def plain_card(card: ModelCard) -> dict[str, Any]:
    """The card as plain data; fields at their default are left out."""
    plain: dict[str, Any] = card.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return plain


def card_from(plain: Mapping[str, Any]) -> ModelCard | None:
    """The card that `plain_card` made this of, perhaps by another version: fields that are not known here are left out.

    None if this version cannot read it. Remembered, as it is asked for at every request.
    """
    return _card_from(msgspec.msgpack.encode(plain))


@lru_cache(maxsize=4096)
def _card_from(encoded: bytes) -> ModelCard | None:
    plain = msgspec.msgpack.decode(encoded)
    known = {name: value for name, value in plain.items() if name in ModelCard.model_fields}
    try:
        return ModelCard.model_validate(known)
    except ValidationError:
        return None


def parse_card(text: str, origin: str) -> ModelCard:
    """Read a card from TOML.

    Args:
        origin: the file's name, for messages.

    Raises:
        ConfigError: names every field at fault.
    """
    try:
        return ModelCard.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The model card {origin} is not valid TOML: {error}.") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'card'}: {fault['msg']}" for fault in error.errors()
        )
        raise ConfigError(f"The model card {origin} is not usable: {faults}. Correct the file or remove it.") from error


def format_card(card: ModelCard) -> str:
    """The card as TOML; fields at their default are left out."""
    return tomli_w.dumps(plain_card(card))


@lru_cache(maxsize=1)
def builtin_cards() -> tuple[ModelCard, ...]:
    """The cards that ship with Tandem, by id."""
    folder = resources.files("tandem.models") / "data" / "cards"
    cards = [
        parse_card(entry.read_text(encoding="utf-8"), entry.name)
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(cards, key=lambda card: card.model_id.casefold()))


class CardStore:
    """Built-in and custom cards.

    Args:
        settings: names the folder of custom cards.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.cards_dir

    def all(self) -> list[ModelCard]:
        """Every card, by id; a custom card hides the built-in one of its id.

        Raises:
            ConfigError: a custom card cannot be used.
        """
        cards = {card.model_id.casefold(): card for card in builtin_cards()}
        for card in self.custom():
            cards[card.model_id.casefold()] = card
        return [cards[key] for key in sorted(cards)]

    def custom(self) -> list[ModelCard]:
        """The custom cards.

        Raises:
            ConfigError: one of them cannot be used.
        """
        return [
            parse_card(path.read_text(encoding="utf-8"), str(path)).model_copy(update={"is_custom": True})
            for path in sorted(self.folder.glob("*.toml"))
        ]

    def get(self, reference: str) -> ModelCard | None:
        """The card with this id or alias, whatever its case; an id wins over an alias.

        Raises:
            ConfigError: a custom card cannot be used.
        """
        wanted = reference.casefold()
        cards = self.all()
        for card in cards:
            if card.model_id.casefold() == wanted:
                return card
        return next((card for card in cards if wanted in {alias.casefold() for alias in card.aliases}), None)

    def add_custom(self, card: ModelCard) -> ModelCard:
        """Keep `card`, in place of an earlier custom one of its id, and return it as kept."""
        card = card.model_copy(update={"is_custom": True})
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(card.model_id)
        partial = path.with_suffix(".partial")
        partial.write_text(format_card(card), encoding="utf-8")
        os.replace(partial, path)
        return card

    def remove_custom(self, model_id: str) -> None:
        """Forget a custom card.

        Raises:
            NotFoundError: there is no custom card of this id.
        """
        path = self._path(model_id)
        if not path.is_file():
            kind = "is built in and stays" if self.get(model_id) else "does not exist"
            raise NotFoundError(f"There is no custom card {model_id!r} to remove: it {kind}.")
        path.unlink()

    def _path(self, model_id: str) -> Path:
        return self.folder / f"{file_name(model_id.casefold())}.toml"


def file_name(model_id: str) -> str:
    """`model_id` as one safe path component; different ids give different names."""
    name = re.sub(r"[^\w.\-]|--", lambda match: "--" if match[0] == "/" else f"~{match[0].encode().hex()}", model_id)
    return f"~{name}" if name.startswith(".") else name
