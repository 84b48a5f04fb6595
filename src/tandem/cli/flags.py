"""Flags that several commands share, and how they and the environment become `Settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tandem.config import Settings


def complete_model(incomplete: str) -> list[str]:
    """Shell completion: models on this machine whose id begins so."""
    from tandem.errors import TandemError
    from tandem.models.store import ModelStore

    try:
        models = ModelStore(load_settings()).list()
    except TandemError:
        return []  # a shell that completes has no place for messages
    names = [name for model in models for name in (model.model_id, *model.card.aliases)]
    return [name for name in names if name.casefold().startswith(incomplete.casefold())]


HostFlag = Annotated[
    str | None, typer.Option("--host", help="Address of the server. [default: TANDEM_HOST or 127.0.0.1]")
]
PortFlag = Annotated[
    int | None,
    typer.Option("--port", "-p", help="Port of the server; 0 takes a free one. [default: TANDEM_PORT or 52415]"),
]
ApiKeyFlag = Annotated[
    str | None,
    typer.Option("--api-key", help="Key that requests need. Prefer TANDEM_API_KEY: flags can be seen by others."),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model id, alias or path. [default: what the running server serves, else demo]",
        autocompletion=complete_model,
    ),
]
MaxTokensFlag = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, help="Longest answer in tokens. [default: no limit of ours]")
]
TemperatureFlag = Annotated[
    float | None,
    typer.Option("--temperature", "-t", min=0.0, help="0 is greedy. [default: what the model's makers recommend]"),
]
SystemFlag = Annotated[str | None, typer.Option("--system", "-s", help="System message.")]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Same seed, same request, same text.")]
StatsFlag = Annotated[bool, typer.Option("--stats/--no-stats", help="Print tokens per second after an answer.")]
FLAGS = {"node_name": "--name", "cluster_name": "--cluster", "cluster_peers": "--peers", "cluster_open": "--open"}
"""Settings whose flags have shorter names."""
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def load_settings(**flags: Any) -> Settings:
    """Settings from `TANDEM_*` variables, overridden by the flags that were given (those not None).

    Raises:
        ConfigError: names every value that cannot be used.
    """
    from pydantic import ValidationError

    from tandem.config import Settings
    from tandem.errors import ConfigError

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            name = str(fault["loc"][0])
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            source = flag if name in given else f"TANDEM_{name.upper()}"
            faults.append(f"{source}={fault['input']}: {fault['msg']}")
        raise ConfigError(f"{'; '.join(faults)}. docs/settings.md describes every setting.") from error
