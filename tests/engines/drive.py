"""Run requests through an engine in this process, and mlx-lm's own generation beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from tandem.engines.base import Engine, EngineOptions, Output
from tandem.engines.registry import build_engine
from tandem.types import (
    Accepted,
    Event,
    Failure,
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptScored,
    Sampling,
    TextDelta,
    TokenLogprob,
    TokenPrompt,
)

TIE = 1e-3
"""Two tokens whose log-probabilities are this close may swap places when the same sum is added up in another order."""

_numbers = itertools.count()


@dataclass
class Answered:
    """Everything one request brought."""

    events: list[Event] = field(default_factory=list)

    @property
    def accepted(self) -> Accepted:
        return next(event for event in self.events if isinstance(event, Accepted))

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def failure(self) -> Failure:
        last = self.events[-1]
        assert isinstance(last, Failure), last
        return last

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def scores(self) -> list[TokenLogprob]:
        """The answer's tokens with their scores; requests need `logprobs`."""
        return [score for event in self.events if isinstance(event, TextDelta) for score in event.logprobs]

    @property
    def tokens(self) -> list[int]:
        return [score.token_id for score in self.scores]

    @property
    def prompt_scores(self) -> list[TokenLogprob]:
        return next(event for event in self.events if isinstance(event, PromptScored)).logprobs

    @property
    def progress(self) -> list[PrefillProgress]:
        return [event for event in self.events if isinstance(event, PrefillProgress)]


def make_engine(folder: Path | None, *, engine: str = "mlx", **options: Any) -> Any:
    """A loaded and warmed-up engine."""
    made = build_engine(
        EngineOptions(engine=engine, model_id="test", path=str(folder or ""), **options)  # type: ignore[arg-type]
    )
    made.load(lambda progress: None)
    made.warm_up()
    return made


def greedy(tokens: Sequence[int], max_tokens: int = 16, **fields: Any) -> GenerationRequest:
    """A greedy request whose answer's tokens can be read off, and which nothing but `max_tokens` ends."""
    settings: dict[str, Any] = {"logprobs": 0, "ignore_eos": True, "sampling": Sampling(temperature=0.0)} | fields
    return GenerationRequest(TokenPrompt(tuple(tokens)), max_tokens=max_tokens, **settings)


def submit(engine: Engine, request: GenerationRequest) -> str:
    request_id = f"r{next(_numbers)}"
    engine.submit(engine.prepare(request_id, request))
    return request_id


def collect(outputs: Iterable[Output], answers: dict[str, Answered]) -> None:
    for output in outputs:
        answers.setdefault(output.request_id, Answered()).events.extend(output.events)


def drain(engine: Engine, answers: dict[str, Answered] | None = None) -> dict[str, Answered]:
    """Step until nothing is left to do."""
    answers = {} if answers is None else answers
    while engine.has_work:
        collect(engine.step(), answers)
    return answers


def run(engine: Engine, *requests: GenerationRequest) -> list[Answered]:
    """Submit all at once; the answers in the order of the requests."""
    ids = [submit(engine, request) for request in requests]
    answers = drain(engine)
    return [answers[request_id] for request_id in ids]


def step_until(engine: Engine, condition: Callable[[dict[str, Answered]], bool], answers: dict[str, Answered]) -> None:
    """Step until `condition` holds."""
    while not condition(answers):
        assert engine.has_work, "the engine went idle before it happened"
        collect(engine.step(), answers)


# ------------------------------------------------------------------------------------------------------- the reference


@dataclass(frozen=True)
class Expected:
    """mlx-lm's answer: its tokens, and the log-probabilities each was chosen from, `[tokens, vocabulary]`."""

    tokens: list[int]
    logprobs: list[mx.array]


class Reference:
    """mlx-lm on its own: the model as mlx-lm loads it, with the weights in float32.

    Args:
        fast: lay the weights out as a CPU likes them best. The values are the same; it saves a quarter of the time.
    """

    def __init__(self, folder: Path, *, fast: bool = False) -> None:
        self.model: nn.Module
        self.model, _ = load_model(folder)
        self.model.set_dtype(mx.float32)
        for _, layer in tree_flatten(self.model.leaf_modules(), is_leaf=nn.Module.is_module) if fast else ():
            if isinstance(layer, nn.Linear | nn.Embedding):
                layer.weight = mx.contiguous(layer.weight.T).T
        mx.eval(self.model.parameters())

    def generate(
        self, prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset(), **options: Any
    ) -> Expected:
        """Greedy tokens of `generate_step`, which mlx-lm's `generate` is a loop around."""
        tokens: list[int] = []
        rows: list[mx.array] = []
        for token, logprobs in generate_step(mx.array(prompt), self.model, max_tokens=max_tokens, **options):
            tokens.append(int(token))
            rows.append(logprobs)
            if token in stop:
                break
        return Expected(tokens, rows)

    def logprobs(self, tokens: Sequence[int]) -> mx.array:
        """Log-probabilities after each of `tokens`, from one forward pass without a cache: `[tokens, vocabulary]`."""
        logits = self.model(mx.array(tokens)[None])[0].astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def is_tie(row: mx.array, one: int, other: int) -> bool:
    """Whether `one` and `other` are the likeliest two, within `TIE` of each other."""
    best = float(mx.max(row))
    return best - float(row[one]) <= TIE and best - float(row[other]) <= TIE


def assert_same(tokens: list[int], expected: Expected, label: object = "") -> int:
    """Check an answer against the reference's.

    Returns:
        1 if they part at a proven tie, else 0.
    """
    assert len(tokens) <= len(expected.tokens), label
    for index, (token, reference) in enumerate(zip(tokens, expected.tokens, strict=False)):
        if token != reference:
            row = expected.logprobs[index]
            assert is_tie(row, token, reference), (
                f"{label}: token {index} is {token}, mlx-lm says {reference} "
                f"({float(row[token]):.5f} against {float(row[reference]):.5f})"
            )
            return 1
    assert len(tokens) == len(expected.tokens), label
    return 0
