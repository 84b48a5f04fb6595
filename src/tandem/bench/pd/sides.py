"""The two sides: started here as `tandem up`, or found at an address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tandem.bench.client import Answer, ask
from tandem.bench.environment import THREAD_VARIABLES
from tandem.bench.pd.plan import SideEngine, SidePlan
from tandem.bench.processes import HOST
from tandem.bench.servers import Target, tandem_server
from tandem.config import settings
from tandem.errors import ConfigError, EngineError, UnavailableError
from tandem.models.store import ModelStore

CALL_SECONDS = 30.0
PORT_SECONDS, POLL_SECONDS = 10.0, 0.1
ENGINES: dict[str, SideEngine] = {"Mlx": "mlx", "Vllm": "vllm", "Sim": "sim"}
"""Engines by how the tags of their instances begin."""


@dataclass(frozen=True, slots=True)
class Side:
    """A node that answers.

    Attributes:
        name: `prefill` or `decode`.
        model: the name that requests carry.
        instance_id: of the instance that answers.
        kv: address of the prefill side's KV port.
        own: the bench started it, without a prefix cache.
    """

    name: str
    host: str
    port: int
    engine: SideEngine
    model: str
    instance_id: str
    kv: str
    api_key: str = ""
    own: bool = True

    async def complete(self, prompt: Sequence[int], tokens: int, deadline: float) -> Answer:
        """Continue token ids greedily for exactly `tokens` tokens, with no help from a prefix cache.

        Raises:
            TandemError: see `client.ask`.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "use_prefix_cache": False,
        }
        return await ask(self.host, self.port, "/v1/completions", body, deadline, api_key=self.api_key)

    async def name_peers(self, addresses: Sequence[str]) -> list[str]:
        """Let these prefill for it from now on. Returns all that may: links of a cluster lead to further ones.

        Raises:
            TandemError: the node says no.
        """
        path = f"/instance/{self.instance_id}/prefill_peers"
        body = {"prefill_peers": list(addresses)}
        answer = await call(self.host, self.port, "PUT", path, body, api_key=self.api_key)
        return list(answer["prefill_peers"])

    async def named_peers(self) -> list[str]:
        """The KV ports that may prefill for it now."""
        path = f"/instance/{self.instance_id}/prefill_peers"
        return list((await call(self.host, self.port, "GET", path, api_key=self.api_key))["prefill_peers"])


async def call(host: str, port: int, method: str, path: str, body: Any = None, *, api_key: str = "") -> Any:
    """One request with a JSON answer.

    Raises:
        UnavailableError: nothing answers there.
        EngineError: the node says no.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limit = aiohttp.ClientTimeout(total=CALL_SECONDS)
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.request(method, f"http://{where}{path}", json=body) as response,
        ):
            status, text = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"No node answers at {where}: {error or 'it took too long'}. Is it running?") from error
    if status >= 400:
        raise EngineError(f"{where}{path} answers {status}: {text.decode('utf-8', 'replace')[:500]}")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise EngineError(f"{where}{path} answers with something else than JSON. Is it Tandem?") from error


@asynccontextmanager
async def two_sides(prefill: SidePlan, decode: SidePlan, work: Path) -> AsyncIterator[tuple[Side, Side]]:
    """Both sides, ready; nobody prefills for either. What was started ends with the context, what ran before gets the
    prefill peers back that it had.

    Raises:
        TandemError: a side did not start, or is not there.
    """
    alone = not (prefill.address or decode.address)
    async with AsyncExitStack() as stack:
        reader = await stack.enter_async_context(_side("prefill", prefill, work, alone))
        writer = await stack.enter_async_context(_side("decode", decode, work, alone))
        check_two(reader, writer)
        yield reader, writer


def check_two(prefill: Side, decode: Side) -> None:
    """Refuse one node as both sides.

    Raises:
        ConfigError: they are the same.
    """
    if prefill.instance_id == decode.instance_id:
        raise ConfigError(f"{prefill.host}:{prefill.port} is named for both sides. A node hands nothing to itself.")


@asynccontextmanager
async def _side(name: str, plan: SidePlan, work: Path, alone: bool) -> AsyncIterator[Side]:
    if plan.address:
        side = await find(name, plan)
        async with _undisturbed(side):
            yield side
        return
    target = up(name, plan, work, alone=alone)
    async with target.process as process:
        (instance,) = (await call(HOST, process.port, "GET", "/health"))["instances"]
        kv = await kv_port(HOST, process.port) if name == "prefill" else ""
        yield Side(name, HOST, process.port, plan.engine, "default", instance["instance_id"], kv)


@asynccontextmanager
async def _undisturbed(side: Side) -> AsyncIterator[None]:
    """Within it nobody prefills for a running node, unless the bench says so."""
    before = await side.named_peers()
    linked = await side.name_peers([])
    try:
        if linked:
            raise ConfigError(
                f"The {side.name} node at {side.host}:{side.port} is linked to {', '.join(linked)}, so it cannot be "
                "measured alone. Start it in a cluster of its own (`tandem up --cluster NAME`)."
            )
        yield
    finally:
        await side.name_peers([address for address in before if address not in linked])


def up(name: str, plan: SidePlan, work: Path, *, alone: bool) -> Target:
    """The `tandem up` of a side, not started yet. This is the one place that knows how an engine is asked for.

    Args:
        alone: both sides run here, where they need no secret.
    """
    # An engine in an environment of its own is found where it was installed, not in a data folder of this run.
    home = work / f"{name}-home"
    home.mkdir(exist_ok=True)
    (home / "engines").symlink_to(settings().home.absolute() / "engines", target_is_directory=True)
    arguments = ["--dtype", plan.dtype]
    if plan.engine == "vllm":
        arguments += ["--engine", "vllm"]
    environment = {
        "TANDEM_KV_PORT": "0" if name == "prefill" else "-1",
        "TANDEM_PREFILL_PEERS": "",
        # Alone and together, every prompt is read from its first token on.
        "TANDEM_PREFIX_CACHE_BYTES": "0",
        "TANDEM_AUTOMATIC_LINKS": "false",
    }
    if alone:
        environment["TANDEM_CLUSTER_SECRET"] = ""
    if plan.threads:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(plan.threads))
    environment |= plan.environment
    return tandem_server(_reference(plan), work, name=name, arguments=arguments, environment=environment)


def _reference(plan: SidePlan) -> str:
    """What `tandem up` is to load: a folder, so that a data folder of its own has nothing to convert."""
    if plan.engine != "sim":
        return str(ModelStore(settings()).locate(plan.model).path)
    values = (f"{name}={str(value).replace(',', '%2C')}" for name, value in plan.profile.items())
    return f"sim:{','.join(values)}"


async def kv_port(host: str, port: int, *, api_key: str = "") -> str:
    """The address of the KV port of the one instance that runs on a node.

    Raises:
        ConfigError: it has none.
        TandemError: the node does not answer.
    """
    # The node tells its ports to the cluster, itself included, a moment after it is ready.
    for _ in range(round(PORT_SECONDS / POLL_SECONDS)):
        ports = list((await call(host, port, "GET", "/state", api_key=api_key))["prefillServerPorts"].values())
        if len(ports) == 1:
            return f"{f'[{host}]' if ':' in host else host}:{ports[0]}"
        await asyncio.sleep(POLL_SECONDS)
    raise ConfigError(
        f"The prefill node at {host}:{port} opens no KV port, or several. Start it with `--kv-port 0`, one model and a "
        "cluster of its own (`tandem up --cluster NAME`), or name the port (`kv`)."
    )


async def find(name: str, plan: SidePlan) -> Side:
    """A node that runs already.

    Raises:
        ConfigError: the address has another form, or the node does not run exactly one instance of the model.
        TandemError: it does not answer.
    """
    host, _, number = plan.address.rpartition(":")
    host = host.strip("[]")
    if not host or not number.isdecimal():
        raise ConfigError(f"[{name}] address is to be host:port, not {plan.address!r}.", param=f"{name}.address")
    port, key = int(number), settings().api_key
    state = await call(host, port, "GET", "/state", api_key=key)
    health = await call(host, port, "GET", "/health", api_key=key)
    instances = health["instances"]
    if len(instances) > 1:
        instances = [one for one in instances if one["model"].casefold() == plan.model.casefold()]
    if len(instances) != 1:
        raise ConfigError(
            f"The {name} node at {plan.address} knows {len(instances)} instances of {plan.model}; with one it is clear "
            "who answers. Nodes to be compared have clusters of their own (`tandem up --cluster NAME`).",
            param=f"{name}.address",
        )
    (instance,) = instances
    (tag,) = state["instances"][instance["instance_id"]]
    engine = next((engine for start, engine in ENGINES.items() if tag.startswith(start)), plan.engine)
    kv = plan.kv
    if name == "prefill" and not kv:
        kv = await kv_port(host, port, api_key=key)
    return Side(name, host, port, engine, instance["model"], instance["instance_id"], kv, key, own=False)
