"""The servers that the bench compares, and how each of them is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.bench.client import Answer, ask
from tandem.bench.processes import HOST, ServerProcess, free_port


@dataclass(frozen=True, slots=True)
class Target:
    """A running server.

    Attributes:
        model: the name that requests carry.
    """

    name: str
    process: ServerProcess
    model: str

    async def complete(
        self,
        prompt: str | Sequence[int],
        tokens: int,
        *,
        on_text: Callable[[float], None] | None = None,
        **more: Any,
    ) -> Answer:
        """Continue a text, or token ids, greedily for at most `tokens` tokens.

        Raises:
            TandemError: see `client.ask`.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0} | more
        return await ask(HOST, self.process.port, "/v1/completions", body, on_text=on_text)

    async def chat(self, messages: list[dict[str, str]], tokens: int) -> Answer:
        """Answer a chat greedily with at most `tokens` tokens.

        Raises:
            TandemError: see `client.ask`.
        """
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0.0}
        return await ask(HOST, self.process.port, "/v1/chat/completions", body)


def tandem_server(
    reference: str,
    work: Path,
    *,
    name: str = "tandem",
    batch: int = 8,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Target:
    """`tandem up` with a data folder of its own, not started yet.

    Args:
        reference: a model folder, or a reference to the `sim` engine.
        work: scratch folder.
        batch: answers decoded together.
        environment: further variables.
        arguments: of `tandem up`, further ones.
    """
    port = free_port()
    command = [sys.executable, "-m", "tandem.cli", "up", reference, "--host", HOST, "--port", str(port), "--json"]
    command += ["--max-batch", str(batch), "--max-queue", "64", "--offline", *arguments]
    variables = {
        "TANDEM_HOME": str(work / f"{name}-home"),
        "TANDEM_API_KEY": "",
        # Whatever else runs on this machine is not to be joined.
        "TANDEM_CLUSTER_NAME": f"bench-{port}",
        "TANDEM_CLUSTER_PORT": "0",
        "TANDEM_CLUSTER_DISCOVERY": "false",
        **(environment or {}),
    }
    return Target(name, ServerProcess(name, command, port, variables, work / f"{name}.log"), "default")


def mlx_lm_server(folder: Path, work: Path) -> Target:
    """mlx-lm's server with its own defaults, not started yet.

    Args:
        folder: a model folder; float32 where Tandem computes in float32.
        work: scratch folder.
    """
    port = free_port()
    command = [sys.executable, "-m", "tandem.bench.mlx_lm_server", "--model", str(folder)]
    command += ["--host", HOST, "--port", str(port)]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    process = ServerProcess("mlx-lm", command, port, environment, work / "mlx-lm.log")
    return Target("mlx-lm", process, "default_model")
