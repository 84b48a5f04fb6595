"""What one run of the bench does, and the bounds that its results are held to."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.errors import ConfigError


class Bound(msgspec.Struct, frozen=True):
    """`at_least` or `at_most`, and how much."""

    kind: Literal["at_least", "at_most"]
    value: float

    def met_by(self, figure: float) -> bool:
        """Whether `figure` is within the bound."""
        return figure >= self.value if self.kind == "at_least" else figure <= self.value

    def __str__(self) -> str:
        return f"{'≥' if self.kind == 'at_least' else '≤'} {self.value:g}"


BOUNDS: dict[str, Bound] = {
    "throughput_ratio_1": Bound("at_least", 0.95),
    "throughput_ratio_8": Bound("at_least", 1.05),
    "ttft_ratio": Bound("at_most", 1.05),
    "server_cpu_ms_per_token": Bound("at_most", 0.15),
}


class Plan(msgspec.Struct, frozen=True):
    """The settings of one run.

    Attributes:
        rounds: of each measurement; medians are taken over them.
        tokens: generated for each answer.
        prompt_tokens: of each prompt in the measurements of throughput.
        ttft_prompt_tokens: of each prompt in the measurements of the time to first text.
        streams: how many answers run side by side, one measurement for each number.
        ttft_samples: pairs of short answers in each round.
        sim_streams: answers side by side in the measurement of the server's CPU time.
        sim_tokens: generated for each of those.
        sim_tps: tokens per second of each of those.
        sim_rounds: of that measurement.
    """

    model: str = "demo"
    rounds: int = 3
    tokens: int = 64
    prompt_tokens: int = 100
    ttft_prompt_tokens: int = 200
    streams: tuple[int, ...] = (1, 8)
    ttft_samples: int = 3
    sim_streams: int = 64
    sim_tokens: int = 200
    sim_tps: float = 30.0
    sim_rounds: int = 3

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: a number is too small.
        """
        for name in ("rounds", "ttft_samples", "sim_streams", "sim_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.", param=name)
        if not self.streams or min(self.streams) < 1:
            raise ConfigError("--streams takes numbers of 1 and more, such as 1,8.", param="streams")
        for name in ("tokens", "sim_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2: a rate needs two tokens.", param=name)
        for name in ("prompt_tokens", "ttft_prompt_tokens"):
            if getattr(self, name) < 16:
                raise ConfigError(f"{name} must be at least 16, so that prompts can differ.", param=name)


def parse_streams(text: str) -> tuple[int, ...]:
    """`1,8` as numbers, each once.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise ConfigError(f"--streams takes numbers such as 1,8, not {text!r}.", param="streams") from error
