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


register_model_loader(LOAD_FORMAT)(_Loader)
