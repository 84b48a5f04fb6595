"""What one run of the hand-off bench does, and the bounds that its results are held to."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from tandem.bench.plan import Bound
from tandem.errors import ConfigError

Section: TypeAlias = Literal["throughput", "ttft", "itl", "memory", "link"]
SECTIONS: tuple[Section, ...] = get_args(Section)
EVERYWHERE: tuple[Section, ...] = ("throughput", "ttft", "itl", "memory")
"""What runs without being named: `link` needs root and Linux."""

BOUNDS: dict[str, Bound] = {
    "socket_ratio": Bound("at_least", 0.6),
    "socket_ratio_tls": Bound("at_least", 0.8),
    "ttft_over_bound": Bound("at_most", 1.10),
    "itl_ratio": Bound("at_most", 1.25),
    "peak_over_kv": Bound("at_most", 1.15),
    "link_ttft_over_bound": Bound("at_most", 1.15),
}


class HandoffPlan(msgspec.Struct, frozen=True):
    """The settings of one run.

    Attributes:
        sections: what is measured.
        rounds: of each measurement; medians are taken over them.
        throughput_tokens: of the prompt whose entries are moved, 128 KiB each.
        ttft_tokens: of each prompt whose first token is timed, over links and over the cable.
        ttft_chunk: tokens that the prefill node computes together.
        links: seconds that the transfer takes, as multiples of those that the prefill takes; the bound is held to 1.
        itl_tokens: of each prompt that arrives while answers run.
        itl_rate: bytes per second at which it arrives.
        itl_streams: answers that run.
        itl_gaps: gaps between tokens of each of them before and after.
        memory_tokens: of the prompt whose peak is measured.
        link_megabits: rate of the cable, in Mbit/s.
    """

    model: str = "demo"
    sections: tuple[Section, ...] = EVERYWHERE
    rounds: int = 3
    throughput_tokens: int = 4096
    ttft_tokens: int = 1536
    ttft_chunk: int = 64
    links: tuple[float, ...] = (1.0, 0.5, 2.0)
    itl_tokens: int = 2048
    itl_rate: float = 118e6
    itl_streams: int = 2
    itl_gaps: int = 40
    memory_tokens: int = 4096
    link_megabits: float = 1000.0

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: a number is too small, or a list is empty.
        """
        for name in ("rounds", "itl_streams", "throughput_tokens", "ttft_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.", param=name)
        for name in ("ttft_tokens", "itl_tokens", "memory_tokens"):
            if getattr(self, name) < 300:
                raise ConfigError(f"{name} must be at least 300: shorter prompts are not handed off.", param=name)
        if self.itl_rate <= 0 or self.itl_gaps < 2:
            raise ConfigError("A rate above 0 and at least 2 gaps are needed to compare gaps.", param="itl_rate")
        if self.link_megabits < 1:
            raise ConfigError("A cable of at least 1 Mbit/s is needed.", param="link_megabits")
        if 1.0 not in self.links or min(self.links) <= 0:
            raise ConfigError("The links are multiples above 0, and 1 is one of them.", param="links")


def parse_sections(text: str) -> tuple[Section, ...]:
    """`throughput,itl` as sections, each once, in the bench's order.

    Raises:
        ConfigError: something else.
    """
    named = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in named if name not in SECTIONS]
    if unknown or not named:
        raise ConfigError(f"--only takes {', '.join(SECTIONS)}, not {text!r}.", param="only")
    return tuple(section for section in SECTIONS if section in named)
