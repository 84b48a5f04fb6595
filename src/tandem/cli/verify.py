"""`tandem verify`: proof that a hand-off changes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.cli.flags import JsonFlag, complete_model, load_settings

if TYPE_CHECKING:
    from tandem.cli.progress import View
    from tandem.config import Settings
    from tandem.engines.base import EngineName
    from tandem.engines.mlx.workbench import Workbench
    from tandem.models.store import LocalModel
    from tandem.verify.report import Report
    from tandem.verify.run import Wish


def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model id, alias or path.", autocompletion=complete_model)
    ] = "demo",
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Verify against the KV port of a running node. [default: a runner of the command's own]",
        ),
    ] = None,
    engine: Annotated[
        Literal["mlx", "vllm"],
        typer.Option(help="Engine of the prefill side. Another than mlx rounds otherwise: no bit need be equal."),
    ] = "mlx",
    quick: Annotated[bool, typer.Option("--quick", help="A small set of cases.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be repeated.")] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="A file with a prompt of your own; may be repeated."),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens of a cold prompt; may be repeated. [default: around every chunk, window and cache step]",
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option(min=0, help="Prompt tokens per prefill step, on both sides; 0 picks the platform's.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to compare after each prompt.")] = 16,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Difference that passes where every bit should be equal.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the generated prompts. [default: 0; with --peer a new one each time, as it remembers]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove that a prefill elsewhere gives what this machine computes itself: caches, logits, greedy tokens.

    A runner process prefills, this process computes the same prompts alone, and both are compared layer by layer: cold,
    with a part in either side's prefix cache, and in a second turn. Ends with status 1 if anything differs.
    """
    import secrets

    from tandem.cli.output import print_json, stdout
    from tandem.verify.run import Wish

    texts = [*(prompt or []), *(path.read_text(encoding="utf-8") for path in prompt_file or [])]
    chosen = seed if seed is not None else secrets.randbelow(1 << 31) if peer else 0
    wish = Wish(tuple(texts), tuple(length or []), quick, tokens, tolerance, chosen, engine == "mlx")
    settings = load_settings(prefill_chunk=chunk or None)
    report = _verify(settings, model, peer, engine, wish)
    if as_json:
        print_json(report.to_json())
    else:
        from tandem.verify.table import show

        show(report, stdout())
    if not report.passed:
        raise typer.Exit(1)


def _verify(settings: Settings, reference: str, peer: str | None, engine: EngineName, wish: Wish) -> Report:
    from tandem.cli.loading import show_loading
    from tandem.cli.progress import Step, progress_view
    from tandem.cluster.bus.secret import cluster_secret
    from tandem.cluster.identity import node_id
    from tandem.engines.installed import require
    from tandem.verify.run import Peer, verify
    from tandem.verify.side import parse_peer, prefill_runner

    given = parse_peer(peer) if peer else None
    if given is None:
        require(engine, settings.home)
    secret = cluster_secret(settings)
    with progress_view() as view, ExitStack() as stack:
        local = obtain_local(settings, reference, view)
        runner = None
        if given is None:
            runner = stack.enter_context(
                prefill_runner(
                    settings,
                    local,
                    settings.prefill_chunk,
                    lambda node, instance: show_loading(node, [instance], view),
                    engine=engine,
                )
            )
        bench = load_workbench(settings, local, view)
        address = runner() if runner is not None else given
        assert address is not None
        return verify(
            bench,
            local.model_id,
            Peer(
                peer or f"a runner of its own ({engine})",
                address,
                secret,
                node_id(settings.home),
                settings.cluster_open,
            ),
            wish,
            lambda done, total, name: view.show(Step(local.model_id, "compare", done, total, "cases", name)),
        )


def obtain_local(settings: Settings, reference: str, view: View) -> LocalModel:
    """A model with a real cache, ready to load.

    Raises:
        UnsupportedError: it is a simulated one.
        TandemError: there is no such model, or it could not be fetched or converted.
    """
    from tandem.cli.loading import interruptible, obtain
    from tandem.errors import UnsupportedError
    from tandem.models.store import ModelStore

    with interruptible() as interrupted:
        model = obtain(ModelStore(settings), reference, view, interrupted)
    if isinstance(model, str):
        raise UnsupportedError(f"{model} has no cache to look at: it only pretends. Name a real model, such as demo.")
    return model


def load_workbench(settings: Settings, model: LocalModel, view: View) -> Workbench:
    """Load a model into this process.

    Raises:
        ModelError: it cannot be loaded.
    """
    from tandem.cli.progress import Step
    from tandem.engines.base import EngineOptions
    from tandem.engines.mlx import blas

    # MLX binds to the BLAS that it finds loaded.
    blas.load()
    from tandem.engines.mlx.workbench import Workbench

    options = EngineOptions(
        engine="mlx",
        model_id=model.model_id,
        path=str(model.path),
        prefill_chunk=settings.prefill_chunk,
        kv_bits=settings.kv_bits,
        context_length=settings.context_length,
        dtype=settings.dtype,
    )
    # A name of its own: the prefill side loads the same model meanwhile.
    name = f"{model.model_id} in this process"
    return Workbench(options, lambda loaded: view.show(Step(name, "load", loaded.done, loaded.total, "layers")))
