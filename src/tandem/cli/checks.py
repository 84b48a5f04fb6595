"""What `tandem doctor` looks at."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tandem.cli.output import human_bytes
from tandem.config import Settings
from tandem.engines.installed import INSTALL_VLLM
from tandem.errors import ConfigError, TandemError

State: TypeAlias = Literal["ok", "info", "warning", "failure"]

SUPPORTED = ((3, 11), (3, 13))
MEASURE_SECONDS = 120.0
SLOW_GFLOPS = 10.0
"""The reference BLAS reaches 3 at most, one core with OpenBLAS some 30."""
LOW_MEMORY = 2_000_000_000
LOW_DISK = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        state: `failure` means that Tandem cannot run.
        advice: what to do about it; empty when nothing needs doing.
        values: the figures behind the summary.
    """

    name: str
    state: State
    summary: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def run_checks(settings: Settings) -> list[Finding]:
    """Look at everything. Takes some seconds: MLX is started and measured in a process of its own."""
    from tandem.cli.cluster_checks import cluster_findings

    return [
        _python(),
        _platform(),
        *_mlx(settings),
        _vllm(settings),
        _demo_model(),
        _cards(settings),
        _models(settings),
        _memory(),
        _home(settings),
        _port(settings),
        *cluster_findings(settings),
        *_hub(settings),
    ]


def _python() -> Finding:
    version = platform.python_version()
    lowest, highest = SUPPORTED
    if lowest <= sys.version_info[:2] <= highest:
        return Finding("Python", "ok", f"{version} ({sys.executable})")
    names = f"{lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}"
    return Finding(
        "Python", "failure", f"{version} is not supported", f"Make a virtual environment with Python {names}."
    )


def _platform() -> Finding:
    cores = os.cpu_count() or 1
    text = f"{platform.system()} {platform.machine()}, {cores} {'core' if cores == 1 else 'cores'}"
    return Finding("platform", "ok", text, values={"cores": cores})


def _mlx(settings: Settings) -> Iterator[Finding]:
    measured = _measure()
    if "error" in measured:
        yield Finding(
            "MLX",
            "failure",
            f"it does not work: {measured['error']}",
            f"Install Tandem's dependencies again: {sys.executable} -m pip install --force-reinstall mlx mlx-lm",
        )
        return
    version = importlib.metadata.version("mlx")
    lm_version = importlib.metadata.version("mlx-lm")
    device = measured["device"]
    yield Finding("MLX", "ok", f"{version} on {device}, mlx-lm {lm_version}", values={"device": device})
    yield _matrix_speed(measured)
    yield _dtype(settings, device)


def _vllm(settings: Settings) -> Finding:
    from tandem.cluster.facts.engines import EngineProber

    prober = EngineProber(home=settings.home)
    fact = asyncio.run(prober.engine("Vllm"))
    if not fact.available:
        # Nothing needs it: MLX is there.
        summary, _, command = fact.reason.partition(": ")
        return Finding("vLLM", "info", summary, f"Install it with: {command}" if command == INSTALL_VLLM else command)
    python = prober.interpreter("Vllm")
    where = "" if python == Path(sys.executable) else f", in an environment of its own ({python.parent.parent})"
    return Finding("vLLM", "ok", f"{fact.version}{where}", values={"python": str(python)})


def _measure() -> dict[str, Any]:
    """What `tandem.cli.measure` prints, or the reason why it printed nothing, as `error`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tandem.cli.measure"], capture_output=True, text=True, timeout=MEASURE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it gave no answer in {MEASURE_SECONDS:.0f} seconds"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _matrix_speed(measured: dict[str, Any]) -> Finding:
    from tandem.engines.mlx.blas import INSTALL_HINT

    gflops, blas, library = measured["gflops"], measured["blas"], measured["library"]
    values = {"gflops": gflops, "blas": blas, "library": library}
    speed = f"{gflops:.0f} GFLOP/s in float32"
    if measured["device"] == "gpu" or blas == "platform":
        return Finding("matrices", "ok", speed, values=values)
    if blas == "slow":
        return Finding(
            "matrices",
            "warning",
            f"{speed}: OpenBLAS is missing, so matrix products run some ten times slower than they could",
            f"Install it with: {INSTALL_HINT}",
            values,
        )
    if gflops < SLOW_GFLOPS:
        return Finding(
            "matrices",
            "warning",
            f"{speed} although {library} is loaded",
            "Other programs may be using the processor; run `tandem doctor` again when they are done.",
            values,
        )
    return Finding("matrices", "ok", f"{speed} through {library}", values=values)


def _dtype(settings: Settings, device: str) -> Finding:
    if device == "gpu":
        chosen = "the model's own" if settings.dtype == "auto" else settings.dtype
        return Finding("weights", "ok", f"{chosen} dtype")
    why = "MLX's CPU build is fast in float32 only: OpenBLAS multiplies that, plain loops everything else"
    if settings.dtype in ("auto", "float32"):
        return Finding("weights", "ok", f"float32, because {why}", values={"dtype": "float32"})
    return Finding(
        "weights",
        "warning",
        f"TANDEM_DTYPE={settings.dtype} is slow here: {why}",
        "Unset TANDEM_DTYPE.",
        {"dtype": settings.dtype},
    )


def _demo_model() -> Finding:
    from tandem.models import packaged

    path = packaged.packaged_gguf()
    if path is not None:
        return Finding("demo model", "ok", f"{packaged.MODEL_ID} is installed", values={"path": str(path)})
    return Finding(
        "demo model",
        "warning",
        f"{packaged.MODEL_ID} is not installed",
        f"Install it with: {sys.executable} -m {packaged.INSTALL_HINT}",
    )


def _cards(settings: Settings) -> Finding:
    from tandem.models.cards import CardStore

    try:
        cards = CardStore(settings).all()
    except ConfigError as error:
        return Finding("cards", "failure", error.message, f"Custom model cards lie in {settings.cards_dir}.")
    custom = sum(card.is_custom for card in cards)
    return Finding("cards", "ok", f"{len(cards) - custom} built-in model cards, {custom} custom")


def _models(settings: Settings) -> Finding:
    from tandem.models.store import ModelStore

    store = ModelStore(settings)
    try:
        count, problems = len(store.list()), store.problems()
    except ConfigError:
        return Finding("models", "warning", "not looked at, because of the cards")
    here = f"{count} {'model' if count == 1 else 'models'} on this machine"
    if not problems:
        return Finding("models", "ok", here)
    reasons = "; ".join(f"{name}: {error.message}" for name, error in problems.items())
    return Finding("models", "warning", f"{here}, {len(problems)} more cannot be used", reasons)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    values = {"total": memory.total, "available": memory.available}
    text = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} available"
    if memory.available < LOW_MEMORY:
        return Finding("memory", "warning", text, "The demo model wants 2 GB. Close other programs.", values)
    return Finding("memory", "ok", text, values=values)


def _home(settings: Settings) -> Finding:
    from tandem.cluster.identity import node_id

    try:
        node_id(settings.home)
    except TandemError as error:
        return Finding("data folder", "failure", error.message)
    free = shutil.disk_usage(settings.home).free
    text = f"{settings.home}, {human_bytes(free)} free"
    if free < LOW_DISK:
        return Finding("data folder", "warning", text, "Free some space, or set TANDEM_HOME.", {"free": free})
    return Finding("data folder", "ok", text, values={"free": free})


def _port(settings: Settings) -> Finding:
    from tandem.cli.remote import find_server

    where = f"{settings.host}:{settings.port}"
    try:
        with socket.create_server((settings.host, settings.port)):
            return Finding("port", "ok", f"{where} is free")
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        server = find_server(settings)
    except TandemError as error:
        return Finding("port", "info", f"a Tandem server runs on {where}: {error.message}")
    if server is not None:
        served = ", ".join(f"{model} ({state})" for model, state in server.instances) or "no model"
        return Finding("port", "info", f"a Tandem server runs on {where} and serves {served}")
    return Finding("port", "warning", f"{where} cannot be used: {reason}", "Choose another with --port or TANDEM_PORT.")


def _hub(settings: Settings) -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    from tandem.models.hub import hub_endpoint

    if settings.offline or constants.is_offline_mode():
        yield Finding("hub", "info", "offline: no model hub is contacted (TANDEM_OFFLINE or HF_HUB_OFFLINE)")
        return
    token = "with a token" if get_token() else "without a token (HF_TOKEN): gated models cannot be fetched"
    yield Finding("hub", "info", f"{hub_endpoint()}, {token}")
