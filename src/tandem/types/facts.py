"""What a node reports of itself. Bytes, seconds and degrees Celsius unless a name says otherwise."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tandem.types.description import EngineLoad, ModelInfo

DeviceKind: TypeAlias = Literal[
    "mac_studio", "mac_mini", "mac_pro", "macbook", "imac", "dgx_spark", "linux_desktop", "linux_laptop", "unknown"
]
InterfaceKind: TypeAlias = Literal["ethernet", "wifi", "thunderbolt", "loopback", "virtual", "unknown"]
Backend: TypeAlias = Literal["MlxMetal", "MlxCuda", "MlxCpu", "Vllm"]
RunnerState: TypeAlias = Literal["starting", "loading", "warming", "ready", "restarting", "failed", "stopped"]
DownloadState: TypeAlias = Literal["pending", "ongoing", "completed", "failed", "cancelled"]


class Device(msgspec.Struct, frozen=True):
    """What kind of machine it is; `model` and `chip` as its makers call them."""

    kind: DeviceKind = "unknown"
    model: str = ""
    chip: str = ""
    os: str = ""
    os_version: str = ""


class Accelerator(msgspec.Struct, frozen=True):
    """One GPU. None where the platform does not tell.

    Attributes:
        memory_total, memory_available: its own; None where it shares the machine's.
        usage: share of time that it was busy, 0 to 1.
        power: watts.
    """

    name: str
    memory_total: int | None = None
    memory_available: int | None = None
    usage: float | None = None
    temperature: float | None = None
    power: float | None = None


class Resources(msgspec.Struct, frozen=True):
    """Memory, disk and load right now.

    Attributes:
        unified: the GPU uses the machine's memory.
        disk_total, disk_available: of the file system that holds the data folder.
        cpu_usage: 0 to 1.
        power: watts of the whole machine.
    """

    memory_total: int = 0
    memory_available: int = 0
    swap_total: int = 0
    swap_available: int = 0
    unified: bool = False
    disk_total: int = 0
    disk_available: int = 0
    cpu_usage: float = 0.0
    temperature: float | None = None
    power: float | None = None
    accelerators: tuple[Accelerator, ...] = ()


class Interface(msgspec.Struct, frozen=True):
    """One address of one network interface.

    Attributes:
        address: without scope.
        speed: bits per second; None where the platform does not tell.
    """

    name: str
    address: str
    kind: InterfaceKind = "unknown"
    speed: int | None = None
    up: bool = True


class EngineFact(msgspec.Struct, frozen=True):
    """Whether an engine really imports here; if not, `reason` says what is missing."""

    backend: Backend
    version: str = ""
    available: bool = True
    reason: str = ""


class RunnerFact(msgspec.Struct, frozen=True):
    """One shard as it runs, or does not.

    Attributes:
        layers_loaded, layers_total: while it loads.
        kv_port: where it prefills for others; None if it does not.
        fingerprint: digest of what a hand-off partner has to agree on, and `tokenizer` of the tokenizer alone.
        layout: digest of its cache layout.
        running: requests that it works on or has queued.
        promised: bytes that it will take once loaded.
    """

    runner_id: str
    instance_id: str
    model_id: str
    state: RunnerState
    error: str | None = None
    layers_loaded: int = 0
    layers_total: int = 0
    kv_port: int | None = None
    fingerprint: str = ""
    tokenizer: str = ""
    layout: str = ""
    running: int = 0
    restarts: int = 0
    promised: int = 0
    info: ModelInfo | None = None
    load: EngineLoad | None = None


class DownloadFact(msgspec.Struct, frozen=True):
    """One model on its way to, or on, a node's disk. `speed` in bytes per second."""

    model_id: str
    state: DownloadState
    done: int = 0
    total: int = 0
    speed: float = 0.0
    error: str | None = None


class LinkRate(msgspec.Struct, frozen=True):
    """Measured between this node and another: bytes per second (None: not measured yet) and seconds there and back."""

    node_id: str
    address: str
    bandwidth: float | None
    round_trip: float


class NodeFacts(msgspec.Struct, frozen=True):
    """Everything one node says of itself.

    Attributes:
        version: of Tandem.
        started: unix seconds, by its own clock.
        sequence: grows with every change within one life of the process.
        life: random, new at every start, so that an earlier life's late messages are told apart.
        api_port: of the HTTP surface; None without one.
        node_port: where other nodes reach it.
    """

    node_id: str
    life: str
    sequence: int
    name: str = ""
    version: str = ""
    started: float = 0.0
    api_port: int | None = None
    node_port: int | None = None
    device: Device = Device()
    resources: Resources = Resources()
    interfaces: tuple[Interface, ...] = ()
    engines: tuple[EngineFact, ...] = ()
    runners: tuple[RunnerFact, ...] = ()
    downloads: tuple[DownloadFact, ...] = ()
    links: tuple[LinkRate, ...] = ()
