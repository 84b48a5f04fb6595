"""Weights loaded in vLLM's own way, with reports of how far it is."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tandem.engines.vllm import progress
from tandem.engines.vllm.progress import missing_siblings

LOAD_FORMAT = "tandem"


class _Loader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        plain = copy.copy(load_config)
        plain.load_format = "auto"
        super().__init__(plain)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        for name, tensor in super().get_all_weights(model_config, model):
            progress.seen(name)
            yield name, tensor

    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = False
    ) -> None:
        came = None if loaded_weights is None else set(loaded_weights)
        # This adds to the set what it does not look for.
        super().track_weights_loading(model, loaded_weights, quantized)
        if came is not None and not quantized:
            missing = missing_siblings([name for name, _ in model.named_parameters()], came)
            if missing:
                raise ValueError(f"{', '.join(missing[:3])}: not initialized from checkpoint")


register_model_loader(LOAD_FORMAT)(_Loader)
