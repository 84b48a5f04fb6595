"""Bodies of the cluster's routes."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from tandem.api.exo_instance import InstanceBody
from tandem.types.intents import InstanceMeta, Sharding

_NAMES = ConfigDict(extra="ignore", protected_namespaces=())


class CreateInstance(BaseModel):
    """An instance as `GET /instance/previews` shows it."""

    model_config = _NAMES

    instance: InstanceBody
    override_memory: bool = Field(False, description="Do not refuse for lack of memory.")


class PlaceInstance(BaseModel):
    """A wish: the cluster decides where it runs."""

    model_config = _NAMES

    model_id: str = Field(min_length=1)
    sharding: Sharding = "Pipeline"
    instance_meta: InstanceMeta = "MlxRing"
    min_nodes: int = Field(1, ge=1)
    node_ids: list[str] = Field([], max_length=64, description="Nodes that have to take part.")
    context_length: int = Field(0, ge=0, le=1 << 31)
    cache_bytes: int = Field(
        0, ge=0, le=1 << 50, description="Cache that a vLLM instance takes; 0 lets the planner choose."
    )
    override_memory: bool = Field(False, description="Do not refuse for lack of memory.")


class LinkBody(BaseModel):
    """These instances prefill for those."""

    model_config = _NAMES

    prefill_instances: list[str] = Field(
        max_length=256, validation_alias=AliasChoices("prefill_instances", "prefillInstances")
    )
    decode_instances: list[str] = Field(
        max_length=256, validation_alias=AliasChoices("decode_instances", "decodeInstances")
    )
    allow_quantisation: bool = Field(False, validation_alias=AliasChoices("allow_quantisation", "allowQuantisation"))


class AddModel(BaseModel):
    """A model to make known."""

    model_config = _NAMES

    model_id: str = Field(min_length=1, max_length=300)


class StartDownload(BaseModel):
    """What to fetch, and where to. The model is named by `modelId`, or by exo's `shardMetadata`."""

    model_config = _NAMES

    target_node_id: str = Field(validation_alias=AliasChoices("targetNodeId", "target_node_id"))
    model_id: str | None = Field(None, validation_alias=AliasChoices("modelId", "model_id"))
    shard_metadata: dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("shardMetadata", "shard_metadata")
    )


class CancelDownload(BaseModel):
    """A download to end."""

    model_config = _NAMES

    target_node_id: str = Field(validation_alias=AliasChoices("targetNodeId", "target_node_id"))
    model_id: str = Field(validation_alias=AliasChoices("modelId", "model_id"))


class Answer(BaseModel):
    """An answer of ours: may grow."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Commanded(Answer):
    """What exo answers every command with."""

    message: str
    command_id: str


class InstanceCreated(Commanded):
    """The instance is part of what the cluster should run. Its nodes begin to load it."""

    instance_id: str
    instance: dict[str, Any]
    model_card: dict[str, Any]


class InstanceRemoved(Commanded):
    """The cluster runs this instance no more."""

    instance_id: str


class PreviewObject(Answer):
    """One way to place a model, or why it is none."""

    model_id: str
    sharding: Sharding
    instance_meta: InstanceMeta
    instance: dict[str, Any] | None
    memory_delta_by_node: dict[str, int] | None
    error: str | None
    nodes: list[str]
    plan: dict[str, Any] | None


class Previews(BaseModel):
    """Ways to place a model."""

    previews: list[PreviewObject]


class LinkObject(Answer):
    """A link."""

    linkId: str
    prefillInstances: list[str]
    decodeInstances: list[str]
    allowQuantisation: bool
    automatic: bool


class LinkChanged(LinkObject):
    """The link as it is now, or was until now."""

    message: str
    command_id: str
    commandId: str
    link_id: str


class FeatureFlags(Answer):
    """What exo's dashboard asks before it shows links."""

    disaggregation: bool


class EngineObject(BaseModel):
    """One engine on one node: whether it really imports there, and if not, what is missing."""

    backend: str
    version: str
    available: bool
    reason: str


class Capabilities(Answer):
    """What this cluster can do."""

    node_id: str
    version: str
    features: dict[str, bool]
    vllm_available: bool
    mlx_available: bool
    instance_metas: list[str]
    shardings: list[str]
    backends: dict[str, list[str]]
    engines: dict[str, list[EngineObject]]


class ModelRemoved(BaseModel):
    """A custom card is gone."""

    message: str
    model_id: str


class FoundModel(BaseModel):
    """A model of this machine, or of the hub."""

    id: str
    author: str
    downloads: int
    likes: int
    last_modified: str
    tags: list[str]


class DownloadCommanded(Answer):
    """`outcome`: what came of it, as the node that it concerns says."""

    message: str
    commandId: str
    command_id: str
    outcome: Any
