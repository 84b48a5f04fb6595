"""What is measured: one round of one kind on one server."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bench.client import Answer
from tandem.bench.servers import Target


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers that ran side by side on one server.

    Attributes:
        seconds: from the first request to the last answer's end.
        server_cpu: seconds of the process that serves HTTP.
        children_cpu: seconds of the processes that it started (Tandem's runner).
        client_cpu: seconds of this process.
    """

    answers: tuple[Answer, ...]
    seconds: float
    server_cpu: float
    children_cpu: float
    client_cpu: float

    @property
    def tokens(self) -> int:
        """Generated tokens, as the server counts them."""
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all answers per second, reading the prompts included."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Mean over the answers, from first to last text."""
        return statistics.fmean(
            (answer.completion_tokens - 1) / max(answer.last_text - answer.first_text, 1e-9) for answer in self.answers
        )

    @property
    def ttft(self) -> float:
        """Median seconds to the first text."""
        return statistics.median(answer.ttft for answer in self.answers)

    @property
    def events_per_token(self) -> float:
        """Pieces of text by generated tokens."""
        return sum(answer.chunks for answer in self.answers) / self.tokens

    @property
    def server_cpu_ms_per_token(self) -> float:
        """Milliseconds of the serving process alone."""
        return self.server_cpu / self.tokens * 1e3

    @property
    def children_cpu_ms_per_token(self) -> float:
        """Milliseconds of the runner."""
        return self.children_cpu / self.tokens * 1e3

    @property
    def client_cpu_ms_per_token(self) -> float:
        """Milliseconds of the bench itself."""
        return self.client_cpu / self.tokens * 1e3

    @property
    def cpu_ms_per_token(self) -> float:
        """Milliseconds of everything on the server's side."""
        return self.server_cpu_ms_per_token + self.children_cpu_ms_per_token


async def run_batch(target: Target, prompts: Sequence[str], tokens: int, **more: Any) -> Batch:
    """Send all `prompts` at once and wait for every answer.

    Raises:
        TandemError: a request failed; the others are given up.
    """
    cpu, own, began = target.process.cpu(), time.process_time(), time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        tasks.extend(group.create_task(target.complete(prompt, tokens, **more)) for prompt in prompts)
    own = time.process_time() - own
    spent = target.process.cpu().since(cpu)
    answers = tuple(task.result() for task in tasks)
    ended = max(answer.ended for answer in answers)
    return Batch(answers, ended - began, spent.server, spent.children, own)


async def second_turn(target: Target, prompt: str, first_tokens: int, tokens: int) -> Answer:
    """Chat twice: the second request repeats the first one and its answer. Returns the second answer.

    Args:
        first_tokens: of the first answer.
        tokens: of the second.
    """
    messages = [{"role": "user", "content": prompt}]
    first = await target.chat(messages, first_tokens)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And what happened next?"}]
    return await target.chat(messages, tokens)
