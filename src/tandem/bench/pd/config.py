"""From a TOML file and command-line options to a plan."""

from __future__ import annotations

import secrets
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.pd.plan import Case, PdPlan, SideEngine, SidePlan, sweep
from tandem.config import settings
from tandem.engines.installed import not_installed
from tandem.engines.sim.profile import is_sim_reference, parse_sim_reference
from tandem.errors import ConfigError

PROMPT_TOKENS = (500, 1000, 2000)
OUTPUT_TOKENS = (16, 64)
ALIASES = {
    "pp": "prompt_tokens",
    "tg": "output_tokens",
    "repeat": "rounds",
    "warmup": "warm_up",
    "timeout": "timeout_seconds",
}
"""exo's names for the same things."""


class _Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int | list[int]
    output_tokens: int | list[int]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    model: str | None = None
    prompt_tokens: int | list[int] | None = None
    output_tokens: int | list[int] | None = None
    cases: list[_Sweep] = []
    rounds: int | None = None
    warm_up: int | None = None
    seed: int | None = None
    timeout_seconds: float | None = None


class Options(msgspec.Struct, frozen=True):
    """What was said on the command line, over what a file says. None and empty say nothing."""

    prefill: str = ""
    decode: str = ""
    model: str = ""
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    rounds: int | None = None
    warm_up: int | None = None
    seed: int | None = None


def make_plan(file: Path | None, options: Options) -> PdPlan:
    """The plan of a run, checked.

    Raises:
        ConfigError: the file cannot be read, or something in it or in the options is wrong.
    """
    told = _File() if file is None else _read(file)
    model = options.model or told.model
    numbers = {
        name: value
        for name in ("rounds", "warm_up", "seed", "timeout_seconds")
        if (value := getattr(options, name, None)) is not None or (value := getattr(told, name)) is not None
    }
    plan = PdPlan(
        prefill=_side("prefill", told.prefill, options.prefill, model),
        decode=_side("decode", told.decode, options.decode, model),
        cases=_cases(told, options),
        # Nodes that run already may remember the prompts of an earlier run.
        **{"seed": secrets.randbelow(1 << 31), **numbers},
    )
    plan.check()
    return plan


def parse_lengths(text: str, name: str) -> tuple[int, ...]:
    """`500,1000` as numbers, each once.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise ConfigError(f"{name} takes numbers such as 500,1000, not {text!r}.", param=name) from error


def vllm_here() -> bool:
    """Whether vLLM is installed, in this environment or in one of its own."""
    return not not_installed("vllm", settings().home)


def _read(file: Path) -> _File:
    try:
        with file.open("rb") as opened:
            content = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}.", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}.", param="config") from error
    told: _File = _convert(_named(content), _File, str(file))
    return told


def _named(table: dict[str, Any]) -> dict[str, Any]:
    named = {ALIASES.get(name, name): value for name, value in table.items()}
    if isinstance(cases := named.get("cases"), list):
        named["cases"] = [_named(one) if isinstance(one, dict) else one for one in cases]
    return named


def _convert(content: Any, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.", param="config") from error


def _side(name: str, table: dict[str, Any], option: str, model: str | None) -> SidePlan:
    table = {"model": model, **table} if model else dict(table)
    if option:
        # An engine named on the command line has the speeds that are named with it.
        table.pop("profile", None)
        table |= _engine(option, name)
    usual: SideEngine = "vllm" if name == "prefill" and vllm_here() else "mlx"
    table.setdefault("engine", usual)
    side: SidePlan = _convert(table, SidePlan, f"[{name}]")
    return side


def _engine(option: str, name: str) -> dict[str, Any]:
    if is_sim_reference(option):
        return {"engine": "sim", "profile": parse_sim_reference(option).to_dict()}
    if option not in ("mlx", "vllm"):
        message = f"--{name} takes mlx, vllm or sim:KEY=VALUE,..., not {option!r}. A config file names running nodes."
        raise ConfigError(message, param=name)
    return {"engine": option}


def _cases(told: _File, options: Options) -> tuple[Case, ...]:
    prompts = options.prompt_tokens or _numbers(told.prompt_tokens)
    outputs = options.output_tokens or _numbers(told.output_tokens)
    if told.cases and not (options.prompt_tokens or options.output_tokens):
        if prompts or outputs:
            raise ConfigError("Name lengths in [[cases]] or beside them, not both.", param="cases")
        found = [case for one in told.cases for case in sweep(_numbers(one.prompt_tokens), _numbers(one.output_tokens))]
        return tuple(dict.fromkeys(found))
    return sweep(prompts or PROMPT_TOKENS, outputs or OUTPUT_TOKENS)


def _numbers(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))
