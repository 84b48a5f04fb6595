"""What one run of the bench of disaggregation does, and the bounds that its results are held to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from tandem.bench.plan import Bound
from tandem.engines.sim.profile import SimProfile
from tandem.errors import ConfigError

SideEngine: TypeAlias = Literal["mlx", "vllm", "sim"]

LONG_PROMPT_TOKENS = 2000
"""The bound on the time to the first token is about prompts of this many tokens and more."""
REMOTE_TOKEN_SHARE = Bound("at_least", 0.99)
TTFT_SPEEDUP = Bound("at_least", 2.5)
"""Of a prompt that vLLM reads for MLX, by one that MLX reads itself, on the same processor."""
SECRETS = ("SECRET", "KEY", "TOKEN", "PASSWORD")


class SidePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One side: a `tandem up` that the bench starts on this machine, or a node that runs already.

    Attributes:
        engine: of a node that runs already, what it says itself counts.
        model: id, alias or path; its tokenizer has to be on this machine in either case.
        profile: speeds and sizes of the `sim` engine.
        dtype: as `tandem up --dtype` takes it.
        threads: of its matrix products; 0 leaves that to the engine.
        environment: further variables.
        address: `host:port` of a running node's HTTP server; empty starts one.
        kv: `host:port` of a running prefill node's KV port; empty takes the address's host and the port that the node
            tells.
    """

    engine: SideEngine = "mlx"
    model: str = "demo"
    profile: dict[str, Any] = {}
    dtype: str = "auto"
    threads: int = 0
    environment: dict[str, str] = {}
    address: str = ""
    kv: str = ""

    def check(self, name: str) -> None:
        """Refuse what cannot be started.

        Raises:
            ConfigError: the fields do not fit together.
        """
        if self.profile and self.engine != "sim":
            raise ConfigError(f"[{name}] has a profile, which only engine = 'sim' takes.", param=f"{name}.profile")
        unknown = sorted(set(self.profile) - set(SimProfile.__struct_fields__))
        if unknown:
            known = ", ".join(SimProfile.__struct_fields__)
            raise ConfigError(f"[{name}.profile] has unknown keys {unknown}. Known: {known}.", param=f"{name}.profile")
        if self.threads < 0:
            raise ConfigError(f"[{name}] threads must be 0 or more.", param=f"{name}.threads")
        if self.kv and not self.address:
            raise ConfigError(f"[{name}] names a KV port of no node: give its address, too.", param=f"{name}.kv")


class Case(msgspec.Struct, frozen=True):
    """Prompts and answers of set lengths, in tokens."""

    prompt_tokens: int
    output_tokens: int


def sweep(prompts: Iterable[int], outputs: Sequence[int]) -> tuple[Case, ...]:
    """Every prompt length with every output length."""
    return tuple(itertools.starmap(Case, itertools.product(prompts, outputs)))


class PdPlan(msgspec.Struct, frozen=True):
    """The settings of one run.

    Attributes:
        rounds: of each case; medians are taken over them.
        warm_up: rounds before that, one for each prompt length, from which both sides learn their speeds.
        seed: of the prompts; the same one makes the same.
        timeout_seconds: for one answer.
    """

    prefill: SidePlan
    decode: SidePlan
    cases: tuple[Case, ...] = sweep((500, 1000, LONG_PROMPT_TOKENS), (16, 64))
    rounds: int = 3
    warm_up: int = 1
    seed: int = 0
    timeout_seconds: float = 1800.0

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: a number is too small, or a side is not sound.
        """
        if self.rounds < 1:
            raise ConfigError("rounds must be at least 1.", param="rounds")
        if self.warm_up < 0:
            raise ConfigError("warm_up must be 0 or more.", param="warm_up")
        if self.timeout_seconds <= 0:
            raise ConfigError("timeout_seconds must be above 0.", param="timeout_seconds")
        if not self.cases:
            raise ConfigError("There is no case: name prompt and output lengths.", param="cases")
        for case in self.cases:
            if case.prompt_tokens < 16:
                raise ConfigError("Prompts need at least 16 tokens, so that they can differ.", param="prompt_tokens")
            if case.output_tokens < 2:
                raise ConfigError("Answers need at least 2 tokens: a rate needs two.", param="output_tokens")
        self.prefill.check("prefill")
        self.decode.check("decode")
        if "sim" in (self.prefill.engine, self.decode.engine) and self.prefill.engine != self.decode.engine:
            raise ConfigError("A simulated model hands nothing to a real one: both sides are sim, or none is.")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; the headline figures are about it."""
        return max(case.prompt_tokens for case in self.cases)

    @property
    def bounds(self) -> dict[str, Bound]:
        """What the figures are held to. Only vLLM for MLX has a known ratio of speeds on one processor."""
        held = {"remote_token_share": REMOTE_TOKEN_SHARE}
        pairing = (self.prefill.engine, self.decode.engine)
        # Nodes on other machines have other ratios.
        here = not (self.prefill.address or self.decode.address)
        if pairing == ("vllm", "mlx") and self.longest >= LONG_PROMPT_TOKENS and here:
            held = {"ttft_speedup_vs_decode_alone": TTFT_SPEEDUP} | held
        return held

    def told(self) -> PdPlan:
        """The plan as it may be printed: without the values of variables that look like secrets."""
        return msgspec.structs.replace(self, prefill=_told(self.prefill), decode=_told(self.decode))


def _told(side: SidePlan) -> SidePlan:
    told = {
        name: "(not shown)" if any(word in name.upper() for word in SECRETS) else value
        for name, value in side.environment.items()
    }
    return msgspec.structs.replace(side, environment=told)
