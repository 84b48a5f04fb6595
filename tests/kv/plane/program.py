"""One side of a hand-off as a process of its own, to be killed: `python -m tests.kv.plane.program server|client N`."""

from __future__ import annotations

import sys
import threading

from tandem.kv.plan import Wanted
from tandem.kv.synthetic import SyntheticProducer
from tests.kv.layouts import LAYOUTS
from tests.kv.plane.support import PROMPT, handoff, serving, staged


def serve(tokens_per_second: float) -> None:
    """Serve the attention layout for ever; the port goes to standard output."""
    layout = LAYOUTS["attention"]
    producer = SyntheticProducer(layout, chunk=100, tokens_per_second=tokens_per_second)
    with serving(layout, producer) as server:
        print(server.address[1], flush=True)
        threading.Event().wait()


def ask(port: int) -> None:
    """Ask for 4000 tokens."""
    handoff(("127.0.0.1", port)).transfer(PROMPT, staged(Wanted(0, 4000))).run()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(float(sys.argv[2]))
    else:
        ask(int(sys.argv[2]))
