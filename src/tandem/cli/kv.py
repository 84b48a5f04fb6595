"""`tandem kv`: what a model's key/value cache looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import JsonFlag, complete_model, load_settings

if TYPE_CHECKING:
    from tandem.kv.describe import Group
    from tandem.kv.layout import Layer, Layout, Part, StateArray

app = typer.Typer(help="Look at key/value caches, which is what travels in a hand-off.", no_args_is_help=True)


@app.callback()
def _kv() -> None:
    """Look at key/value caches, which is what travels in a hand-off."""


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model id, alias or path.", autocompletion=complete_model)
    ],
    as_json: JsonFlag = False,
) -> None:
    """Show what a model keeps for each token, layer by layer, and how long that takes to move.

    Loads the model and reads it off a real cache. TANDEM_KV_BITS and TANDEM_DTYPE count.
    """
    from tandem.cli.output import print_json
    from tandem.cli.progress import progress_view
    from tandem.cli.verify import load_workbench, obtain_local

    settings = load_settings()
    with progress_view() as view:
        local = obtain_local(settings, model, view)
        bench = load_workbench(settings, local, view)
    layout, digest = bench.layout, bench.fingerprint.digest().hex()
    if as_json:
        print_json({"model": local.model_id, "dtype": bench.dtype, "fingerprint": digest, **_to_json(layout)})
    else:
        _print(local.model_id, bench.dtype, digest, layout)


def _to_json(layout: Layout) -> dict[str, object]:
    from tandem.kv.describe import LINKS, groups, volumes, window_bytes

    return {
        "layout": layout.digest(),
        "layers": len(layout.layers),
        "groups": [group.to_json() for group in groups(layout)],
        "bytes_per_token": layout.bytes_per_token,
        "window_bytes_per_token": layout.window_bytes_per_token,
        "window_bytes": window_bytes(layout),
        "state_bytes": layout.state_bytes,
        "links": {link.name: link.rate for link in LINKS},
        "volumes": [
            {
                "tokens": volume.tokens,
                "bytes": volume.bytes,
                "seconds": dict(zip((link.name for link in LINKS), volume.seconds, strict=True)),
            }
            for volume in volumes(layout)
        ],
    }


def _print(model: str, dtype: str, digest: str, layout: Layout) -> None:
    from rich.table import Table

    from tandem.cli.output import human_bytes, stdout
    from tandem.kv.describe import LINKS, groups, volumes, window_bytes

    console = stdout()
    shape = Table(title=f"{model}: {len(layout.layers)} layers, weights in {dtype}", title_justify="left")
    for name in ("layers", "kind", "holds"):
        shape.add_column(name, overflow="fold")
    shape.add_column("bytes a token", justify="right")
    shape.add_column("constant", justify="right")
    for group in groups(layout):
        shape.add_row(group.numbers, _kind(group.layer), _holds(group), *_sizes(group))
    console.print(shape)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("grows with each token", human_bytes(layout.bytes_per_token))
    if layout.window_bytes_per_token:
        facts.add_row("windows, once they are full", human_bytes(window_bytes(layout)))
    if layout.state_bytes:
        facts.add_row("states, whatever the length", human_bytes(layout.state_bytes))
    console.print(facts)
    console.print(f"fingerprint {digest}", highlight=False, soft_wrap=True)
    moved = Table(title="A prompt's hand-off, uncompressed, in seconds", title_justify="left")
    moved.add_column("tokens", justify="right")
    moved.add_column("size", justify="right")
    for link in LINKS:
        moved.add_column(f"{link.name}, {human_bytes(int(link.rate))}/s", justify="right")
    for volume in volumes(layout):
        seconds = (f"{seconds:.3f}" for seconds in volume.seconds)
        moved.add_row(str(volume.tokens), human_bytes(volume.bytes), *seconds)
    console.print(moved)


def _kind(layer: Layer) -> str:
    if layer.kind == "window":
        return f"window of {layer.window}{f', {layer.sinks} sinks' if layer.sinks else ''}"
    if layer.kind == "state":
        return "state"
    return f"tokens in {layer.bits} bits, groups of {layer.group_size}" if layer.bits else "tokens"


def _holds(group: Group) -> str:
    layer = group.layer
    return ", ".join([*(_part(part) for part in layer.parts), *(_state(state) for state in layer.states)])


def _part(part: Part) -> str:
    return f"{part.name} {part.heads}x{part.dim} {part.dtype}"


def _state(state: StateArray) -> str:
    return f"state {state.name} {'x'.join(map(str, state.shape))} {state.dtype}"


def _sizes(group: Group) -> tuple[str, str]:
    """Bytes a token and constant bytes, of all layers of the group together."""
    from tandem.cli.output import human_bytes

    layer, count = group.layer, len(group.layers)
    constant = layer.state_bytes + layer.bytes_per_token * layer.window
    return (
        human_bytes(layer.bytes_per_token * count) if layer.bytes_per_token else "",
        human_bytes(constant * count) if constant else "",
    )
