"""`tandem run`: one question, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tandem.cli.flags import (
    HostFlag,
    JsonFlag,
    MaxTokensFlag,
    ModelFlag,
    PortFlag,
    SeedFlag,
    StatsFlag,
    SystemFlag,
    TemperatureFlag,
    load_settings,
)


def run(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="The question; - stands for what standard input holds."),
    ] = None,
    model: ModelFlag = None,
    system: SystemFlag = None,
    max_tokens: MaxTokensFlag = None,
    temperature: TemperatureFlag = None,
    seed: SeedFlag = None,
    stats: StatsFlag = True,
    as_json: JsonFlag = False,
    host: HostFlag = None,
    port: PortFlag = None,
) -> None:
    """Ask one question and stream the answer to the terminal.

    Asks the running server if it serves the model, else loads the model for this one answer. With standard input:
    cat report.txt | tandem run "Summarise this:" -
    """
    from tandem.cli.answering import Question, answerer
    from tandem.cli.output import print_json
    from tandem.cli.printing import Answer, print_answer, print_statistics
    from tandem.errors import CancelledError
    from tandem.types import Message

    text = _prompt_text(prompt or [])
    messages = (*((Message("system", system),) if system else ()), Message("user", text))
    answer = Answer()
    try:
        with answerer(load_settings(host=host, port=port), model) as source:
            request = Question(max_tokens, temperature, seed).about(messages)
            print_answer(source.answer(request), answer, quiet=as_json)
            if as_json:
                print_json(answer.to_dict(source.model_id))
            elif stats and answer.finished is not None:
                print_statistics(answer.finished)
    except KeyboardInterrupt as error:
        raise CancelledError("Interrupted.") from error


def _prompt_text(words: list[str]) -> str:
    from tandem.errors import InvalidRequestError

    if not words and not sys.stdin.isatty():
        words = ["-"]
    text = " ".join(word for word in words if word != "-")
    if "-" in words:
        text = "\n\n".join(part for part in (text, sys.stdin.read().strip()) if part)
    if not text.strip():
        raise InvalidRequestError('There is no question. Try: tandem run "What is the capital of France?"')
    return text
