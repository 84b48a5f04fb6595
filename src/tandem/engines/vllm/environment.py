"""Process variables that vLLM reads while it is imported. A runner sets them before anything of vLLM's."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ALWAYS = {
    # The engine runs in the runner's own process and thread: the runner is the subprocess already.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The newer model runner has another interface for logits processors and is not there on CPUs: one for all.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # One token more than the context: of a prompt that fills it, the last token is scored, never followed.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # A model comes from its folder, never from a hub.
    "HF_HUB_OFFLINE": "1",
}
"""What this engine depends on."""

UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    # torch.distributed listens even for one process; nobody else has to reach it.
    "VLLM_HOST_IP": "127.0.0.1",
    # Threads that wait for work spin by default. With anything else on the cores that costs nine tenths of the speed.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What a person may have good reasons to set otherwise."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables. Without effect on parts of vLLM, torch or OpenMP that are imported already."""
    environment.update(ALWAYS)
    for name, value in UNLESS_SET.items():
        environment.setdefault(name, value)
