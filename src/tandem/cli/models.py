"""`tandem models`: what is on this machine, and how more gets here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.flags import JsonFlag, complete_model, load_settings

if TYPE_CHECKING:
    from tandem.models.cards import ModelCard
    from tandem.models.store import LocalModel

app = typer.Typer(help="List, fetch, import and remove models.", no_args_is_help=True)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model id, alias or path.", autocompletion=complete_model)
]


@app.command("list")
def list_(
    known: Annotated[
        bool, typer.Option("--all", "-a", help="Also the models that Tandem has a card of and could fetch.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the models on this machine."""
    from tandem.cli.output import command_name, note, print_json
    from tandem.models.store import ModelStore

    store = ModelStore(load_settings())
    rows = [_local_row(model) for model in store.list()]
    if known:
        here = {row["id"].casefold() for row in rows}
        rows += [_card_row(card) for card in store.cards.all() if card.model_id.casefold() not in here]
    problems = {name: error.message for name, error in store.problems().items()}
    if as_json:
        print_json({"models": rows, "problems": problems})
        return
    for name, message in problems.items():
        note(f"{name} cannot be used: {message}")
    if not rows:
        note(f"There is no model on this machine. `{command_name()} models pull MODEL` fetches one.")
        return
    _print_table(rows)


def _local_row(model: LocalModel) -> dict[str, Any]:
    return _card_row(model.card) | {
        "id": model.model_id,
        "state": "ready" if model.ready else "converts at first use",
        "source": model.source,
        "size_bytes": model.size_bytes,
        "path": str(model.path if model.ready else model.origin),
        "origin": str(model.origin) if model.origin else None,
        "removable": model.removable,
    }


def _card_row(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.model_id,
        "state": "not here",
        "source": "hub",
        "size_bytes": card.storage_size,
        "path": None,
        "origin": None,
        "removable": False,
        "context_length": card.context_length,
        "capabilities": list(card.capabilities),
        "aliases": list(card.aliases),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from tandem.cli.output import human_bytes, stdout

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", overflow="fold")
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("CONTEXT", justify="right")
    table.add_column("CAN", overflow="fold")
    table.add_column("SOURCE")
    table.add_column("STATE", style="dim")
    for row in rows:
        table.add_row(
            row["id"],
            human_bytes(row["size_bytes"]),
            str(row["context_length"] or "?"),
            ", ".join(row["capabilities"]),
            row["source"],
            row["state"],
        )
    stdout().print(table)


@app.command()
def show(model: ModelArgument, as_json: JsonFlag = False) -> None:
    """Describe one model: its card, and where it lies."""
    from tandem.cli.output import print_json
    from tandem.errors import NotFoundError
    from tandem.models.store import ModelStore

    store = ModelStore(load_settings())
    local = store.find(model)
    card = local.card if local is not None else store.cards.get(model)
    if card is None:
        store.locate(model)  # says what is close to this name
        raise NotFoundError(f"No model is called {model!r}.")
    details = _local_row(local) if local is not None else _card_row(card)
    details["card"] = card.model_dump(mode="json", exclude_none=True)
    if as_json:
        print_json(details)
    else:
        _print_details(details)


def _print_details(details: dict[str, Any]) -> None:
    from rich.table import Table

    from tandem.cli.output import human_bytes, stdout

    card = details["card"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "model": details["id"],
        "aliases": ", ".join(details["aliases"]),
        "state": details["state"],
        "source": details["source"],
        "size": human_bytes(details["size_bytes"]),
        "path": details["path"],
        "family": card["family"],
        "quantisation": card["quantization"],
        "layers": card["n_layers"],
        "hidden size": card["hidden_size"],
        "context": f"{details['context_length']} tokens" if details["context_length"] else "",
        "can": ", ".join(details["capabilities"]),
        "engines": ", ".join(card["backends"]),
        "sampling": ", ".join(f"{name} {value}" for name, value in card.get("sampling_defaults", {}).items()),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, str(value))
    stdout().print(table)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model id, alias, or a hub repository's name.")],
    as_json: JsonFlag = False,
) -> None:
    """Fetch a model from the hub, or convert the packaged one, so that it is ready to load.

    An interrupted download goes on where it stopped. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are respected.
    """
    from tandem.cli.loading import interruptible, obtain
    from tandem.cli.progress import progress_view
    from tandem.models.store import LocalModel, ModelStore

    store = ModelStore(load_settings())
    with progress_view() as view, interruptible() as interrupted:
        found = obtain(store, model, view, interrupted)
    if isinstance(found, LocalModel):
        _print_result(found, "is ready", as_json)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A folder in Hugging Face layout, or a GGUF file.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Its id from now on. [default: the folder's or file's name]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy a model folder, or convert a GGUF file, into Tandem's store."""
    from tandem.cli.loading import interruptible
    from tandem.cli.progress import callback_for, progress_view
    from tandem.errors import CancelledError
    from tandem.models.progress import Progress
    from tandem.models.store import ModelStore

    store = ModelStore(load_settings())
    with progress_view() as view, interruptible() as interrupted:
        report = callback_for(view, name or path.name)

        def report_unless_interrupted(progress: Progress) -> None:
            if interrupted():
                raise CancelledError("Interrupted. Nothing was imported.")
            report(progress)

        imported = store.import_(path, name, report_unless_interrupted)
    _print_result(imported, "is imported", as_json)


def _print_result(model: LocalModel, what: str, as_json: bool) -> None:
    from tandem.cli.output import command_name, human_bytes, print_json, stdout

    if as_json:
        print_json(_local_row(model))
        return
    console = stdout()
    line = f"{model.model_id} {what}: {human_bytes(model.size_bytes)} in {model.path}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Serve it with: {command_name()} up {model.model_id}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def rm(
    model: ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove a model from Tandem's store, or what an interrupted download left of it."""
    from tandem.cli.output import human_bytes, print_json, stdout
    from tandem.models.store import ModelStore

    store = ModelStore(load_settings())
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Remove {model} from this machine?", abort=True)
    freed = store.remove(model)
    if as_json:
        print_json({"id": model, "freed_bytes": freed})
    else:
        stdout().print(f"{model} is removed: {human_bytes(freed)} freed.", markup=False, highlight=False)
