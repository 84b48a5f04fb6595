"""Makes what runs on this machine what the intents say."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from tandem.cluster.instances import InstanceStatus, LocalInstances
from tandem.cluster.local_models import reference_to
from tandem.cluster.tasks import background
from tandem.engines.base import EngineName
from tandem.engines.sim.profile import parse_sim_reference
from tandem.errors import ConfigError, NotFoundError, TandemError
from tandem.models.cards import plain_card
from tandem.models.store import LocalModel
from tandem.types.facts import RunnerFact
from tandem.types.intents import InstanceIntent, InstanceMeta, Shard

RETRY_SECONDS = 30.0
"""After a failure that may pass, such as a download that broke off."""
logger = logging.getLogger("tandem.cluster")


@dataclass(slots=True)
class _Coming:
    """An instance whose model is not here yet."""

    intent: InstanceIntent
    task: asyncio.Task[None] | None = None
    error: TandemError | None = None

    @property
    def failed(self) -> bool:
        """Whether trying again would not help."""
        return self.error is not None and (self.error.permanent or isinstance(self.error, NotFoundError))


class Reconciler:
    """Launches and removes local instances as intents come and go. One shard a node and instance.

    Args:
        obtain: finds or fetches a model by its reference.
        changed: called when `runner_facts` may say something new.

    Attributes:
        leaving: the node is about to stop, and its runners are to get no more requests.
    """

    def __init__(
        self,
        node_id: str,
        local: LocalInstances,
        obtain: Callable[[str], Awaitable[LocalModel | str]],
        changed: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._local = local
        self._obtain = obtain
        self._changed = changed
        self._coming: dict[str, _Coming] = {}
        self._going: dict[str, asyncio.Task[None]] = {}
        self._shards: dict[str, Shard] = {}
        self._applied: dict[str, InstanceIntent] = {}
        self.leaving = False

    def apply(self, instances: Iterable[InstanceIntent]) -> None:
        """Begin to run what is wanted here and does not run, and to stop the rest. Returns at once."""
        wanted: dict[str, InstanceIntent] = {}
        for intent in instances:
            mine = next((shard for shard in intent.shards if shard.node_id == self._node_id), None)
            if mine is not None and len(intent.shards) == 1:
                wanted[intent.instance_id] = intent
        for instance_id in [known for known in (*self._coming, *self._running()) if known not in wanted]:
            self._drop(instance_id)
        for instance_id, intent in wanted.items():
            applied = self._applied.get(instance_id)
            if applied is not None and _content(applied) != _content(intent):
                self._drop(instance_id)  # another instance under the same id
            there = instance_id in self._local and instance_id not in self._going
            if not there and instance_id not in self._coming:
                self._applied[instance_id] = intent
                self._shards[instance_id] = intent.shards[0]
                self._coming[instance_id] = coming = _Coming(intent)
                coming.task = background(self._bring(coming), f"bring {instance_id}")

    def _running(self) -> list[str]:
        return [instance.instance_id for instance in self._local]

    def _drop(self, instance_id: str) -> None:
        coming = self._coming.pop(instance_id, None)
        if coming is not None and coming.task is not None:
            coming.task.cancel()
        if instance_id in self._local and instance_id not in self._going:
            task = asyncio.create_task(self._local.remove(instance_id), name=f"remove {instance_id}")
            self._going[instance_id] = task
            task.add_done_callback(lambda _: self._going.pop(instance_id, None))
        self._shards.pop(instance_id, None)
        self._applied.pop(instance_id, None)

    async def _bring(self, coming: _Coming) -> None:
        intent = coming.intent
        if intent.instance_id in self._going:
            await asyncio.wait({self._going[intent.instance_id]})
        while True:
            self._changed()
            try:
                model = await self._obtain(intent.reference)
                engine: EngineName = "vllm" if intent.meta == "Vllm" else "mlx"
                self._local.launch(model, instance_id=intent.instance_id, engine=engine, **intent.options)
            except TandemError as error:
                coming.error = error
            except Exception as error:
                logger.exception("instance %s could not be launched", intent.instance_id)
                coming.error = ConfigError(f"The instance cannot be launched: {error}. Remove it and place it again.")
            else:
                del self._coming[intent.instance_id]
                self._changed()
                return
            logger.error("instance %s (%s): %s", intent.instance_id, intent.model_id, coming.error.message)
            self._changed()
            if coming.failed:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """End what is under way. Running instances are left to their owner."""
        tasks = [*self._going.values(), *(coming.task for coming in self._coming.values() if coming.task is not None)]
        for coming in self._coming.values():
            if coming.task is not None:
                coming.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def error_of(self, instance_id: str) -> TandemError | None:
        """Why an instance's model could not be had."""
        coming = self._coming.get(instance_id)
        return coming.error if coming is not None else None

    def runner_facts(self) -> list[RunnerFact]:
        """Every shard that this machine has, or should have."""
        coming = [
            RunnerFact(
                runner_id=self._shards[instance_id].runner_id,
                instance_id=instance_id,
                model_id=one.intent.model_id,
                state="failed" if one.failed else "starting",
                error=one.error.message if one.error is not None else None,
                promised=int(one.intent.card.get("storage_size", 0)),
            )
            for instance_id, one in self._coming.items()
            if instance_id in self._shards
        ]
        running = [
            runner_fact(status, self._shards[status.instance_id])
            for status in self._local.instances()
            if status.instance_id in self._shards
        ]
        if not self.leaving:
            return [*coming, *running]
        return [replace(fact, state="stopped", error="its node is stopping") for fact in (*coming, *running)]


def _content(intent: InstanceIntent) -> tuple[object, ...]:
    return intent.reference, intent.meta, intent.options, intent.shards


def runner_fact(status: InstanceStatus, shard: Shard) -> RunnerFact:
    """What the cluster is told of a local instance."""
    progress = status.progress
    return RunnerFact(
        runner_id=shard.runner_id,
        instance_id=status.instance_id,
        model_id=status.model_id,
        state=status.state,
        error=status.error,
        layers_loaded=progress.done if progress else 0,
        layers_total=progress.total if progress else 0,
        kv_port=status.kv_address[1] if status.kv_address else None,
        fingerprint=status.identity.model,
        tokenizer=status.identity.tokenizer,
        layout=status.identity.layout,
        running=status.running,
        restarts=status.restarts,
        promised=0 if status.state == "ready" else status.card.storage_size,
        info=status.info,
        load=status.load,
    )


def instance_here(
    node_id: str, model: LocalModel | str, instance_id: str, engine: EngineName = "mlx"
) -> InstanceIntent:
    """The intent of a whole instance on one node.

    Args:
        model: a local model, or a reference to the `sim` engine.
        engine: that runs a local model.
    """
    meta: InstanceMeta
    if isinstance(model, str):
        card, reference, meta = parse_sim_reference(model).card(), model, "Sim"
    else:
        card, reference = model.card, reference_to(model)
        meta = "Vllm" if engine == "vllm" else "MlxRing"
    return InstanceIntent(
        instance_id=instance_id,
        model_id=card.model_id,
        reference=reference,
        meta=meta,
        sharding="Pipeline",
        shards=(Shard(node_id, f"{instance_id}-0", 0, 1, 0, card.n_layers),),
        card=plain_card(card),
        created=time.time(),
    )
