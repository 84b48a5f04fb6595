"""Write the parts of docs/settings.md and docs/cli.md that come from the code: `make docs`.

With --check nothing is written; status 1 says that they are out of date. Everything outside the markers is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from tandem.cli.main import app
from tandem.config import Settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- begin: written by scripts/write_docs.py -->"
END = "<!-- end -->"


def settings_table() -> str:
    """Every field of `Settings` as a Markdown table."""
    rows = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        default = "the platform's data folder" if field.default_factory else f"`{field.default!r}`".replace("'", '"')
        rows.append(f"| `TANDEM_{name.upper()}` | {kind} | {default} | {cell(field.description or '')} |")
    return "\n".join(rows)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below `command` that does something, with its full name."""
    context = typer.Context(command, info_name=path)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if not names:
        yield path, command
    for name in names:
        yield from commands(command.get_command(context, name), f"{path} {name}")


def reference() -> str:
    """Every command with its arguments and options, as Markdown."""
    sections = []
    for path, command in commands(typer.main.get_command(app), "tandem"):
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        usage = " ".join([path, *(placeholder(argument) for argument in arguments), "[OPTIONS]"])
        lines = [f"### `{path}`", "", f"```\n{usage}\n```", "", command.help.strip(), ""]
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {names(parameter)} | {meaning(parameter)} |" for parameter in (*arguments, *options)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def placeholder(argument: Any) -> str:
    """How an argument looks in a usage line."""
    return argument.metavar or argument.name.upper()


def names(parameter: Any) -> str:
    """An option's spellings, or an argument's placeholder."""
    if parameter.param_type_name == "argument":
        return f"`{placeholder(parameter)}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def meaning(parameter: Any) -> str:
    """The help text, with the default where the text does not name it."""
    text = cell(parameter.help or "")
    default = parameter.default
    shown = "[default:" in text or default is None or default is False or parameter.required
    return text if shown else f"{text} [default: {'on' if default is True else default}]"


def cell(text: str) -> str:
    """`text` for a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def replaced(text: str, part: str) -> str:
    """`text` with what lies between the markers replaced by `part`."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def main() -> int:
    """Write, or check.

    Returns:
        The exit status.
    """
    stale = []
    for name, part in (("settings.md", settings_table()), ("cli.md", reference())):
        path = DOCS / name
        old = path.read_text(encoding="utf-8")
        new = replaced(old, part)
        if new != old:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"docs/{' and docs/'.join(stale)} {'are out of date: make docs' if '--check' in sys.argv else 'written'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
