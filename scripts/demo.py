"""`make demo`: start a server, ask the packaged model one question, say how to go on.

Keeps serving until Ctrl-C where standard input and output are a terminal. Elsewhere, or with DEMO_ONCE=1, it stops the
server and ends with status 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tandem.cli.output import stdout
from tandem.cli.progress import Step, progress_view

QUESTION = "What is the capital of France? Answer in one sentence."
TANDEM = Path(sys.executable).with_name("tandem")


def main() -> int:
    """Run the demo.

    Returns:
        The exit status.
    """
    say("Starting a server with SmolLM2-135M-Instruct (packaged, nothing is downloaded) on a free port.")
    command = [str(TANDEM), "up", "demo", "--host", "127.0.0.1", "--port", "0", "--json"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    # In a session of its own, so that every signal it gets is one that we sent: a second one would end it at once.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        try:
            ready = wait_ready(server.stdout)
            if ready is None:
                return server.wait() or 1
            status = ask(ready["url"])
            if status == 0:
                go_on(ready)
                if stays():
                    server.wait()
        except KeyboardInterrupt:
            status = 0
        finally:
            stop(server)
    if stays():
        say("The server has stopped.")
    return status


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treat a request to end like Ctrl-C."""
    raise KeyboardInterrupt


def stop(server: subprocess.Popen[str]) -> None:
    """End the server in order; at once when Ctrl-C is pressed meanwhile."""
    while server.poll() is None:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()


def stays() -> bool:
    """Whether the server goes on after the answer."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("DEMO_ONCE")


def wait_ready(events: IO[str]) -> dict[str, Any] | None:
    """Show the server's progress until it is ready; None if it ended before that (it has said why)."""
    with progress_view() as view:
        for line in events:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
            if kind == "progress":
                view.show(Step(**event))
            elif kind == "ready":
                return event
    return None


def ask(url: str) -> int:
    """Ask the question with the very command that a person would use."""
    port = url.rpartition(":")[2]
    arguments = ["run", "--host", "127.0.0.1", "--port", port, "--temperature", "0", "--max-tokens", "100", QUESTION]
    say(f'tandem run "{QUESTION}"')
    print(flush=True)
    return subprocess.run([str(TANDEM), *arguments], stdin=subprocess.DEVNULL).returncode


def go_on(ready: dict[str, Any]) -> None:
    """Print the address and what to try next."""
    url, model = ready["url"], ready["models"][0]["id"]
    port = url.rpartition(":")[2]
    command = os.path.relpath(TANDEM)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me a joke."}]})
    print()
    say(f"The server's address: {url}")
    say("Go on with:")
    print(f"    {command} chat --port {port}")
    print(f"    curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f"    OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none   (for any OpenAI client)")
    if stays():
        say("The server keeps running. Ctrl-C ends it.")
    else:
        say(f"Not a terminal, or DEMO_ONCE is set: the server ends now. `{command} up` starts it again.")
    sys.stdout.flush()


def say(text: str) -> None:
    """One line of ours, told apart from the commands' own output."""
    stdout().print(f"[bold]==>[/bold] {text}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
