"""exo's casing: camelCase in bodies, snake_case in events. We write snake_case and convert."""

from __future__ import annotations

from typing import Any


class ById(dict[str, Any]):
    """An object whose keys are ids, or names that keep their spelling."""


def camel_name(name: str) -> str:
    """`in_bytes` as `inBytes`."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def snake_name(name: str) -> str:
    """`inBytes` as `in_bytes`. Tags, which begin with a capital, stay."""
    if name[:1].isupper():
        return name
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def camel(value: Any) -> Any:
    """`value` with all keys in camelCase, but for those of `ById`."""
    if isinstance(value, ById):
        return {key: camel(item) for key, item in value.items()}
    if isinstance(value, dict):
        return {camel_name(key): camel(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [camel(item) for item in value]
    return value


def snake(value: Any) -> Any:
    """`value` with all keys in snake_case: for objects that hold no ids as keys."""
    if isinstance(value, dict):
        return {snake_name(key): snake(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snake(item) for item in value]
    return value


def memory(size: int) -> dict[str, int]:
    """Bytes as exo writes them."""
    return {"in_bytes": size}
