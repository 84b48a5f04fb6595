"""The prefill side: a runner of the product in a process of its own, for as long as it is needed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tandem.cluster.bus.secret import cluster_secret
from tandem.cluster.identity import node_id
from tandem.cluster.instances import LocalInstances
from tandem.cluster.loop_thread import LoopThread
from tandem.config import Settings
from tandem.engines.base import EngineName
from tandem.errors import ConfigError, UnsupportedError
from tandem.models.store import LocalModel

Address: TypeAlias = tuple[str, int]
Wait: TypeAlias = Callable[[LocalInstances, str], Coroutine[Any, Any, None]]
"""Waits on the loop until the instance is ready."""


@contextmanager
def prefill_runner(
    settings: Settings, model: LocalModel, chunk: int, wait: Wait, *, engine: EngineName = "mlx"
) -> Iterator[Callable[[], Address]]:
    """Start a runner with a KV port on loopback; the process ends with the block.

    Yields:
        A function that waits for the runner and returns its KV port's address.

    Raises:
        TandemError: the runner cannot be started or cannot load the model. By the yielded function.
    """
    changes = {"kv_host": "127.0.0.1", "kv_port": 0, "prefill_peers": "", "prefill_chunk": chunk}
    if not settings.prefix_cache_bytes:
        changes["prefix_cache_bytes"] = -1  # a warm server needs one
    node = LocalInstances(settings.model_copy(update=changes), node_id(settings.home), cluster_secret(settings))
    with LoopThread() as loop:
        try:
            instance = loop.call(_launch(node, model, engine))

            def address() -> Address:
                loop.call(wait(node, instance))
                found = node.instances()[0].kv_address
                if found is None:
                    raise UnsupportedError(f"The engine of {model.model_id} cannot prefill for others.")
                return found

            yield address
        finally:
            loop.call(node.stop())


async def _launch(node: LocalInstances, model: LocalModel, engine: EngineName) -> str:
    return node.launch(model, engine=engine)


def parse_peer(text: str) -> Address:
    """`host:port` as (host, port).

    Raises:
        ConfigError: it is not of that form.
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--peer={text} is not of the form HOST:PORT. Give the KV port of a running node.")
    return host.strip("[]"), int(port)
