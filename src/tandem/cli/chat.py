"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tandem.cli.flags import (
    HostFlag,
    MaxTokensFlag,
    ModelFlag,
    PortFlag,
    SeedFlag,
    StatsFlag,
    SystemFlag,
    TemperatureFlag,
    load_settings,
)

if TYPE_CHECKING:
    from tandem.cli.answering import Answerer, Question
    from tandem.types import Message

HELP = """/clear          forget the conversation
/system [TEXT]  set the system message, or remove it
/help           this
/exit           leave (or Ctrl-D)
Ctrl-C stops an answer."""


def chat(
    model: ModelFlag = None,
    system: SystemFlag = None,
    max_tokens: MaxTokensFlag = None,
    temperature: TemperatureFlag = None,
    seed: SeedFlag = None,
    stats: StatsFlag = True,
    host: HostFlag = None,
    port: PortFlag = None,
) -> None:
    """Talk to a model: several turns, with /clear, /system, /help and /exit. Ctrl-C stops an answer only."""
    from tandem.cli.answering import Question, answerer
    from tandem.cli.output import note
    from tandem.errors import CancelledError

    try:
        with answerer(load_settings(host=host, port=port), model) as source:
            note(f"Talking to {source.model_id}. /help lists the commands; Ctrl-D leaves.")
            Conversation(source, Question(max_tokens, temperature, seed), system, stats).run()
    except KeyboardInterrupt as error:
        raise CancelledError("Interrupted.") from error


class Conversation:
    """The turns so far, and the loop that adds to them.

    Args:
        source: who answers.
        question: what holds for every answer.
        stats: print tokens per second after each.
    """

    def __init__(self, source: Answerer, question: Question, system: str | None, stats: bool) -> None:
        self._source = source
        self._question = question
        self._system = system or ""
        self._stats = stats
        self._turns: list[Message] = []

    def run(self) -> None:
        """Take turns until the person leaves."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 - importing it gives `input` line editing and a history
        while (line := self._read()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._take_turn(text)

    def _read(self) -> str | None:
        """The next line; None at the end of input. Ctrl-C empties the line."""
        while True:
            try:
                return input(">>> " if sys.stdin.isatty() else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                print("\n(/exit or Ctrl-D leaves)")

    def _command(self, text: str) -> None:
        from tandem.cli.output import note

        name, _, rest = text.partition(" ")
        if name == "/clear":
            self._turns.clear()
            note("The conversation is forgotten.")
        elif name == "/system":
            self._system = rest.strip()
            note("The system message is set." if self._system else "There is no system message any more.")
        elif name == "/help":
            note(HELP)
        else:
            note(f"There is no {name}.\n{HELP}")

    def _take_turn(self, text: str) -> None:
        from tandem.cli.failure import red_line
        from tandem.cli.output import note
        from tandem.cli.printing import Answer, print_answer, print_statistics
        from tandem.errors import TandemError
        from tandem.types import Message

        self._turns.append(Message("user", text))
        system = (Message("system", self._system),) if self._system else ()
        answer = Answer()
        events = self._source.answer(self._question.about((*system, *self._turns)))
        try:
            print_answer(events, answer)
        except KeyboardInterrupt:
            note("[stopped]")
        except TandemError as error:
            red_line(error.message)
            if not answer.text:
                self._turns.pop()
                return
        # What was said before an interruption stays part of the conversation.
        self._turns.append(Message("assistant", "".join(answer.text)))
        if self._stats and answer.finished is not None:
            print_statistics(answer.finished)
