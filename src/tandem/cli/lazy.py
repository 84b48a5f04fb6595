"""A group of commands whose module is imported only when one of them is used."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

import typer.main
from typer.core import TyperGroup


def lazy_group(module: str, attribute: str) -> type[TyperGroup]:
    """A group class that takes its commands from the `typer.Typer` called `attribute` in `module`."""

    class LazyGroup(TyperGroup):
        @cached_property
        def _loaded(self) -> TyperGroup:
            return typer.main.get_group(getattr(import_module(module), attribute))

        def list_commands(self, ctx: Any) -> list[str]:
            return self._loaded.list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._loaded.get_command(ctx, cmd_name)

    return LazyGroup
