"""Settings: environment variables (`TANDEM_*`) with defaults, and the folders Tandem uses.

Command-line flags override the environment. Every field is documented in `docs/settings.md`; a test says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """All settings. Sizes in bytes, times in seconds, unless a name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_", frozen=True, extra="ignore")

    home: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("tandem")),
        description="Folder for everything Tandem keeps: models, converted weights, custom cards, logs.",
    )
    models_dirs: str = Field("", description="Further model folders, separated by ':'. Only read, never written to.")
    offline: bool = Field(False, description="Never contact a model hub.")
    node_name: str = Field("", description="Name of this machine for people; empty takes the computer's own.")

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(52415, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one.")
    api_key: str = Field("", description="When set, every request needs `Authorization: Bearer <key>`.")
    allowed_origins: str = Field(
        "", description="Web pages beside this machine's own that may use the node: origins, by commas; `*` for all."
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="Largest accepted request body.")

    max_batch: int = Field(8, gt=0, description="Requests an instance decodes at the same time.")
    max_queue: int = Field(64, ge=0, description="Requests that may wait for an instance before it answers 503.")
    prefill_chunk: int = Field(0, ge=0, description="Prompt tokens per prefill step; 0 picks one for the platform.")
    max_decode_stall: float = Field(
        0.5,
        gt=0,
        description="Longest pause by a prefill step (of 64 tokens at least) while answers run; more when many wait.",
    )
    prefix_cache_bytes: int = Field(
        -1, ge=-1, description="Budget of the prefix cache; -1 takes a share of free memory, 0 switches it off."
    )
    kv_bits: int = Field(0, description="Quantise the KV cache to this many bits (4 or 8); 0 keeps full precision.")
    context_length: int = Field(0, ge=0, description="Cap on prompt plus answer; 0 takes the model's own.")
    engine: Literal["mlx", "vllm"] = Field(
        "mlx", description="Engine of the models that `tandem up`, `run` and `chat` load; `tandem engines` lists them."
    )
    dtype: str = Field(
        "auto", description="Weights as `float32`, `bfloat16` or `float16`; `auto` picks the platform's fastest."
    )

    kv_host: str = Field(
        "",
        description="Address of the KV port, where other nodes have prompts prefilled. Empty takes every address "
        "with a cluster secret, loopback without.",
    )
    kv_port: int = Field(0, ge=-1, le=65535, description="The KV port: -1 opens none, 0 takes a free one.")
    prefill_peers: str = Field("", description="KV ports (`host:port`, by commas) that may prefill for this node.")
    kv_codec: Literal["raw", "auto", "int8", "int4"] = Field(
        "raw",
        description="How entries are sent to this node: `raw` is exact, `int8` and `int4` are smaller and nearly so; "
        "`auto` uses them on links where that is sooner.",
    )
    cluster_secret: str = Field(
        "",
        description="Shared by all nodes, which then speak mutual TLS: 12 words, or 16 characters and more. Empty "
        "takes the file `cluster_secret` of the data folder, if there is one.",
    )

    cluster_name: str = Field("tandem", min_length=1, description="Nodes of the same name form a cluster.")
    cluster_open: bool = Field(
        False, description="Serve other machines without a cluster secret: only for a network that you trust wholly."
    )
    cluster_port: int = Field(
        52414,
        ge=0,
        le=65535,
        description="Port for the other nodes (UDP with a secret, TCP without); 0 takes a free one.",
    )
    cluster_peers: str = Field(
        "", description="Other nodes' `host:port`, by commas: dialled where multicast does not reach. Best all of them."
    )
    automatic_links: bool = Field(
        True, description="Let instances of one model prefill for one another without being told, where that is sooner."
    )
    cluster_discovery: bool = Field(True, description="Find other nodes, and be found, by multicast.")

    load_deadline: float = Field(
        600.0, gt=0, description="A model that makes no loading progress for this long is given up."
    )
    warm_up_deadline: float = Field(300.0, gt=0, description="Longest accepted first step of a new runner.")
    step_deadline: float = Field(
        180.0, gt=0, description="A runner with work whose engine makes no step for this long is restarted."
    )
    stop_deadline: float = Field(
        10.0, ge=0, description="Running answers may take this long once the server was asked to stop."
    )
    max_restarts: int = Field(5, ge=0, description="Failed starts in a row before an instance is given up.")

    @field_validator("prefill_peers", "cluster_peers")
    @classmethod
    def _check_peers(cls, value: str) -> str:
        parse_addresses(value.split(","))
        return value

    @property
    def models_dir(self) -> Path:
        """Downloaded and imported models."""
        return self.home / "models"

    @property
    def converted_dir(self) -> Path:
        """Models converted from GGUF."""
        return self.home / "converted"

    @property
    def cards_dir(self) -> Path:
        """Custom model cards."""
        return self.home / "cards"

    @property
    def logs_dir(self) -> Path:
        """Runners' standard error."""
        return self.home / "logs"


def parse_addresses(items: Iterable[str]) -> tuple[str, ...]:
    """`host:port` addresses, without spaces around them, empty ones and repetitions.

    Raises:
        ValueError: one has another form.
    """
    addresses = tuple(dict.fromkeys(filter(None, (item.strip() for item in items))))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"'{address}' is not of the form host:port")
    return addresses


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read once."""
    return Settings()
