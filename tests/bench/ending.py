"""A bench that is told to stop in its first round."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from functools import partial

import psutil


def ends_with_its_children(
    command: Sequence[str], environment: dict[str, str], number: signal.Signals, status: int, *, least: int
) -> None:
    """It ends with `status`, says nothing of a fault, and leaves none of its processes, of which there are `least`."""
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # Whoever runs these tests in the background of a shell ignores SIGINT, and so would every child.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= least
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
