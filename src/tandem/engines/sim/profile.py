"""What a simulated model does: its speeds, its sizes, its faults.

A reference such as `sim:prefill_tps=5000,decode_tps=100` names a profile; `sim` alone takes the defaults.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.errors import ConfigError
from tandem.models.cards import ModelCard

PREFIX = "sim"


class SimProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Speeds in tokens per second; 0 means as fast as the machine can.

    Attributes:
        model_id: name the instance serves under.
        prefill_tps: prompt tokens per second, one prompt at a time.
        decode_tps: tokens per second of each running answer, whatever the batch.
        answer_tokens: length of an answer that nothing else ends.
        context_length: prompt plus answer.
        load_seconds: spent loading, over `layers` steps.
        layers, kv_heads, head_dim: shape of the simulated cache (float32).
        quantisation: of the simulated weights; their answers are the same in all of them.
        prefix_hits: keep a prefix cache.
        prefix_entries: tokens that it holds.
        peer_queue: prompts of other nodes that may wait for their prefill.
        script: the text of every answer, instead of words drawn from the prompt's hash.
        die_at_token: the process exits with `die_status` when an answer reaches this many tokens; 0 never.
        hang_at_token: the engine thread stops for ever there; 0 never.
        fail_at_load: loading ends in an error.
    """

    model_id: str = "sim"
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    answer_tokens: int = 64
    context_length: int = 32768
    load_seconds: float = 0.0
    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    quantisation: str = ""
    prefix_hits: bool = False
    prefix_entries: int = 1 << 17
    peer_queue: int = 8
    script: str = ""
    die_at_token: int = 0
    die_status: int = 1
    hang_at_token: int = 0
    fail_at_load: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `EngineOptions.profile`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def card(self) -> ModelCard:
        """A model card, so that a simulated model is listed like any other."""
        return ModelCard(
            model_id=self.model_id,
            storage_size=1,  # a card has a size; nothing is stored
            n_layers=self.layers,
            hidden_size=self.kv_heads * self.head_dim,
            num_key_value_heads=self.kv_heads,
            supports_tensor=False,
            tasks=("TextGeneration",),
            family="sim",
            quantization=self.quantisation,
            capabilities=("text", "tools"),
            context_length=self.context_length,
        )


def is_sim_reference(reference: str) -> bool:
    """Whether `reference` names the simulated engine."""
    return reference == PREFIX or reference.startswith(PREFIX + ":")


def parse_sim_reference(reference: str) -> SimProfile:
    """Read `sim:key=value,key=value`. A value's comma is written as `%2C`.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type.
    """
    values: dict[str, str] = {}
    for item in reference[len(PREFIX) :].lstrip(":").split(","):
        if item:
            key, _, value = item.partition("=")
            values[key] = value.replace("%2C", ",")
    unknown = sorted(set(values) - set(SimProfile.__struct_fields__))
    names = ", ".join(SimProfile.__struct_fields__)
    if unknown:
        raise ConfigError(f"'{reference}' has unknown keys {unknown}. Known keys: {names}.")
    try:
        return msgspec.convert(values, SimProfile, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"'{reference}' is not a sim profile: {error}. Known keys: {names}.") from error
