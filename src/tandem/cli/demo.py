"""`tandem demo`: two nodes on this machine, one question, and where its time went."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import JsonFlag, complete_model, load_settings

if TYPE_CHECKING:
    from tandem.cli.demo_nodes import Ready
    from tandem.cli.printing import Answer
    from tandem.cli.remote import Server
    from tandem.types import Statistics

READER, WRITER = "reader", "writer"
LINK_SECONDS = 30.0
"""For the nodes to see each other, and for the link to lead somewhere."""
MAX_TOKENS = 48


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model id, alias or path.", autocompletion=complete_model)
    ] = "demo",
    keep: Annotated[bool, typer.Option("--keep", help="Let both nodes run until Ctrl-C.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a hand-off: two nodes on this machine, one reads the prompt, the other one writes the answer.

    Starts both as processes with data folders and a cluster of their own, links them, asks one question, prints the
    answer and a timeline, and ends both. Needs no network. A node that runs here already is left alone.
    """
    from tandem.errors import CancelledError

    keeping = False
    try:
        with _ends_like_interrupt(), _linked_nodes(model) as (server, reader, writer):
            answer = _ask(server, writer, quiet=as_json)
            assert answer.finished is not None
            statistics = answer.finished.statistics
            if as_json:
                from tandem.cli.output import print_json

                print_json(answer.to_dict(writer.model_id) | {"url": writer.url, "reader_url": reader.url})
            else:
                _print_timeline(statistics, reader, writer)
            _check(statistics)
            keeping = keep
            if not as_json:
                _go_on(writer, keep)
            while keep:
                time.sleep(3600.0)
    except KeyboardInterrupt as error:
        if not keeping:
            raise CancelledError("Interrupted. Both nodes have ended.") from error


@contextmanager
def _ends_like_interrupt() -> Iterator[None]:
    """Within it a request to end is a Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _linked_nodes(reference: str) -> Iterator[tuple[Server, Ready, Ready]]:
    """The writer's HTTP server, the reader and the writer."""
    from tandem.cli.cluster_client import ClusterClient
    from tandem.cli.demo_nodes import two_nodes, wait_ready
    from tandem.cli.loading import interruptible, obtain
    from tandem.cli.output import note
    from tandem.cli.progress import progress_view
    from tandem.cli.remote import Server
    from tandem.models.store import ModelStore

    with progress_view() as view, interruptible() as interrupted:
        model = obtain(ModelStore(load_settings()), reference, view, interrupted)
    note("Starting two nodes on this machine ...")
    names = (READER, WRITER)
    with two_nodes(names, model) as events:
        with progress_view() as view:
            reader, writer = wait_ready(names, events, view)
        server = Server("127.0.0.1", writer.port, "", ())
        client = ClusterClient(server)
        client.wait_ready([reader.instance_id, writer.instance_id], LINK_SECONDS)
        client.link([reader.instance_id], [writer.instance_id])
        _wait_linked(server, writer)
        yield server, reader, writer


def _wait_linked(server: Server, writer: Ready) -> None:
    """Wait until the link leads to the reader's KV port."""
    from tandem.errors import DeadlineError

    end = time.monotonic() + LINK_SECONDS
    while not server.call("GET", f"/instance/{writer.instance_id}/prefill_peers")["prefill_peers"]:
        if time.monotonic() > end:
            raise DeadlineError("The two nodes do not find each other's ports. `tandem doctor` looks at this machine.")
        time.sleep(0.05)


def _say(text: str, style: str = "") -> None:
    from tandem.cli.output import stdout

    stdout().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()


def _ask(server: Server, writer: Ready, *, quiet: bool) -> Answer:
    from tandem.cli.answering import Question
    from tandem.cli.demo_text import QUESTION, TASK, TEXT
    from tandem.cli.printing import Answer, print_answer
    from tandem.cli.remote import RemoteAnswerer
    from tandem.types import Message

    answer = Answer()
    request = Question(max_tokens=MAX_TOKENS, temperature=0.0).about((Message("user", QUESTION),))
    if not quiet:
        _say(f"{TASK} [{len(TEXT.split())} words that begin with: {TEXT[:53]} ...]\n", "dim")
    print_answer(RemoteAnswerer(server, writer.model_id).answer(request), answer, quiet=quiet)
    return answer


def _print_timeline(statistics: Statistics, reader: Ready, writer: Ready) -> None:
    from tandem.cli.timeline import draw, rows, scale

    end = statistics.ttft_seconds + statistics.decode_seconds
    drawn = rows(statistics, READER, WRITER)
    indent = " " * max(len(row.label) for row in drawn)
    handoff = statistics.handoff
    _say("\nWhere its time went\n", "bold")
    for line in draw(drawn, end):
        _say(f"  {line}")
    for line in scale(statistics).split("\n"):
        _say(f"  {indent}  {line}", "dim")
    _say("")
    for label, text in (
        ("prompt", _shares(statistics)),
        ("hand-off", _pieces(statistics)),
        ("why", handoff.reason),
        ("address", f"{writer.url} ({WRITER}; {reader.url} is the {READER})"),
    ):
        _say(f"  {label:<9}{text}")


def _shares(statistics: Statistics) -> str:
    handoff = statistics.handoff
    return (
        f"{statistics.prompt_tokens} tokens: the {READER} read {handoff.remote_tokens}, the {WRITER} "
        f"{handoff.local_tokens}"
    )


def _pieces(statistics: Statistics) -> str:
    from tandem.cli.output import human_bytes
    from tandem.cli.timeline import seconds

    handoff = statistics.handoff
    if handoff.prefill == "local":
        return "none"
    return (
        f"{human_bytes(handoff.bytes)} with codec {handoff.codec}; queued {seconds(handoff.queued_seconds)}, computed "
        f"{seconds(handoff.computing_seconds)}, not hidden behind that {seconds(handoff.exposed_seconds)}"
    )


def _go_on(writer: Ready, keep: bool) -> None:
    from tandem.cli.output import command_name

    command = command_name()
    if keep:
        _say(f"  {'go on':<9}{command} chat --port {writer.port}; {command} status --port {writer.port}")
        _say("\nBoth nodes keep running. Ctrl-C ends them.")
    else:
        _say(f"  {'go on':<9}both nodes end now; `{command} demo --keep` lets them run, `{command} up` starts your own")


def _check(statistics: Statistics) -> None:
    """A demonstration without a hand-off has failed.

    Raises:
        HandoffError: the prompt was read by the writer.
    """
    from tandem.errors import HandoffError

    if statistics.handoff.prefill == "local":
        raise HandoffError(f"The prompt was not handed off: {statistics.handoff.reason}")
