"""Who answers a question asked on the command line: a running server, or an instance started for the occasion."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.cli.output import command_name, note

if TYPE_CHECKING:
    from tandem.config import Settings
    from tandem.types import Event, GenerationRequest, Message

DEFAULT_MODEL = "demo"


class Answerer(Protocol):
    """Answers requests, one at a time."""

    @property
    def model_id(self) -> str:
        """The model that answers."""

    def answer(self, request: GenerationRequest) -> Generator[Event]:
        """The events of one answer, the last of which is `Finished`. Closing the iterator cancels the request.

        Raises:
            TandemError: the request was refused or failed.
        """


@dataclass(frozen=True, slots=True)
class Question:
    """What the flags say about every answer."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def about(self, messages: tuple[Message, ...]) -> GenerationRequest:
        """The request for the next turn of `messages`."""
        from tandem.types import ChatPrompt, GenerationRequest, Sampling

        return GenerationRequest(
            prompt=ChatPrompt(messages),
            max_tokens=self.max_tokens,
            sampling=Sampling(temperature=self.temperature, seed=self.seed),
        )


@contextmanager
def answerer(settings: Settings, model: str | None) -> Iterator[Answerer]:
    """The running server if it serves `model`, else an instance in this process, stopped at the end.

    Args:
        model: id, alias, path or `sim` reference; None takes what the server serves, else the demo model.

    Raises:
        TandemError: the model cannot be had, or the server wants another API key.
    """
    from tandem.cli.remote import find_server

    server = find_server(settings)
    if server is not None:
        remote = server.answerer(model)
        if remote is not None:
            yield remote
            return
    wanted = model or DEFAULT_MODEL
    if server is not None:
        note(f"The server at {server.url} does not serve {wanted}: loading it here, for this command only.")
    else:
        note(f"No server is running: loading {wanted} here, for this command only.")
        note(f"`{command_name()} up` would keep it ready.")
    from tandem.cli.local import local_answerer

    with local_answerer(settings, wanted) as local:
        yield local
