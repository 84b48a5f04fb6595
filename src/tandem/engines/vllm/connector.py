"""The connector that runs inside vLLM: hands over cache entries while prompts are computed, and loads received ones.

vLLM makes two of them in our process, one for its scheduler, which decides what is read and loaded in a step, and one
for its worker, which does it. Both find the engine's `Registry` by its key. Written against vLLM 0.32.0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tandem.engines.vllm.cache_layout import windows_of
from tandem.engines.vllm.exchange import Registry, find_registry
from tandem.engines.vllm.loading import Prepared, incomplete, prepare
from tandem.engines.vllm.steps import NO_BLOCK, Ledger, StepWork, Tables
from tandem.engines.vllm.worker import CacheWorker
from tandem.errors import HandoffError

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("tandem.vllm")


def transfer_config(registry: Registry) -> KVTransferConfig:
    """What makes vLLM use this connector with that registry."""
    return KVTransferConfig(
        kv_connector=TandemConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"registry": registry.key},
    )


class StepMetadata(KVConnectorMetadata):
    """A step's work, from the scheduler's connector to the worker's."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class TandemConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. One class for both roles, as vLLM wants it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._registry = find_registry(vllm_config.kv_transfer_config.get_from_extra_config("registry", ""))
        self._ledger = Ledger(self._registry)
        self._offered: dict[str, Prepared] = {}
        self._worker: CacheWorker | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Entries are handed over in the step that computes them; a preemption takes nothing away."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are read while the step runs, which a whole captured graph would skip."""
        return True

    # --------------------------------------------------------------------------------------------------- the scheduler

    def on_new_request(self, request: Request) -> None:
        self._ledger.added(request.request_id, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        # vLLM asks again for each attempt to start the request.
        self._offered.pop(request.request_id, None)
        source = self._registry.source_of(request.request_id)
        if source is None:
            return 0, False
        try:
            prepared = prepare(source, self._registry.layers(), num_computed_tokens, request.num_prompt_tokens)
        except HandoffError as error:
            self._registry.end_source(request.request_id)
            source.refused(error.message)
            return 0, False
        except Exception as error:  # of one prompt; the others must not suffer, and this one can be computed here
            logger.exception("received entries are not used")
            self._registry.end_source(request.request_id)
            source.refused(str(error))
            return 0, False
        if prepared is None:
            return 0, False
        self._offered[request.request_id] = prepared
        return prepared.end - prepared.start, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        prepared = self._offered.pop(request.request_id, None)
        if num_external_tokens:
            assert prepared is not None
            assert prepared.end - prepared.start == num_external_tokens
            self._ledger.will_load(request.request_id, prepared)
            self._withdraw_incomplete(prepared, blocks.get_block_ids())

    def _withdraw_incomplete(self, prepared: Prepared, tables: Tables) -> None:
        """Let nobody find in the prefix cache what is loaded in part."""
        found = set()
        for group, table in zip(self._kv_cache_config.kv_cache_groups, tables, strict=True):
            for window in windows_of(group.kv_cache_spec):
                block = incomplete(prepared, window, group.kv_cache_spec.block_size, table)
                if block is not None:
                    found.add(block)
        if found:
            assert self._kv_cache_manager is not None
            self._kv_cache_manager.evict_blocks(found - {NO_BLOCK})

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        counts = scheduler_output.num_scheduled_tokens
        before = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = {request: (before[request], before[request] + count) for request, count in counts.items()}
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        return StepMetadata(self._ledger.step(scheduled, state.resolve_block_ids))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offered.pop(request.request_id, None)
        self._ledger.finished(request.request_id)
        return False, None

    # ------------------------------------------------------------------------------------------------------ the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        modules = self._vllm_config.compilation_config.static_forward_context
        self._worker = CacheWorker.of(self._registry, self._kv_cache_config, kv_caches, modules)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._with_work(lambda worker, work: worker.begin(work.reads))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        # Before the model runs if anything is loaded; else vLLM calls this after it.
        self._with_work(lambda worker, work: worker.load(work.loads))

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._with_work(lambda worker, work: worker.layer_written(layer_name))

    def wait_for_save(self) -> None:
        self._with_work(lambda worker, work: worker.finish())

    def _with_work(self, act: Callable[[CacheWorker, StepWork], None]) -> None:
        if self._worker is not None and self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, StepMetadata)
            if metadata.work.reads or metadata.work.loads:
                act(self._worker, metadata.work)
