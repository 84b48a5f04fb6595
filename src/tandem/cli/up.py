"""`tandem up`: serve models over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.cli.flags import ApiKeyFlag, HostFlag, PortFlag, complete_model, load_settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def up(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Model ids, aliases, paths of folders or GGUF files, or sim:KEY=VALUE,... [default: demo]",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    no_models: Annotated[
        bool,
        typer.Option(
            "--no-models", help="Load no model: serve those of the cluster, and wait for what is placed here."
        ),
    ] = False,
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    name: Annotated[
        str | None, typer.Option("--name", help="This machine's name for people. [default: the computer's own]")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Nodes of the same cluster name find each other. [default: tandem]")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peers", metavar="HOST:PORT", help="A node to dial where multicast does not reach. Repeat."),
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Serve other machines, and let them join, without an API key and a secret.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", help="mlx, or vllm (`tandem engines` lists them). [default: mlx]")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", help="Requests a model answers at the same time. [default: 8]")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option("--max-queue", help="Requests that may wait for a model. [default: 64]")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option("--context-length", help="Cap on prompt plus answer. [default: the model's own]")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option("--prefill-chunk", help="Prompt tokens per step. [default: the platform's best]")
    ] = None,
    prefix_cache_bytes: Annotated[
        int | None,
        typer.Option("--prefix-cache-bytes", help="Budget of the prefix cache; 0 switches it off. [default: a share]"),
    ] = None,
    prefill_peer: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill-peer", metavar="HOST:PORT", help="KV port of a node that may read prompts for this one. Repeat."
        ),
    ] = None,
    kv_port: Annotated[
        int | None,
        typer.Option("--kv-port", help="Read prompts for other nodes here; 0 takes a free port. [default: none]"),
    ] = None,
    kv_codec: Annotated[
        str | None, typer.Option("--kv-codec", help="How entries are sent here: raw, int8, int4, auto. [default: raw]")
    ] = None,
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", help="Quantise the KV cache to 4 or 8 bits. [default: full precision]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16. [default: auto]")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never contact a model hub.")] = False,
    events: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per event on standard output, for scripts.")
    ] = False,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="End in order when standard input ends, too: as the program that started it."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the node does.")] = False,
) -> None:
    """Serve one or more models over HTTP until Ctrl-C.

    Fetches and converts what is not here yet. The first Ctrl-C lets running answers finish for some seconds and stops
    in order; a second one stops at once.
    """
    settings = load_settings(
        host=host,
        port=port,
        api_key=api_key,
        node_name=name,
        cluster_name=cluster,
        cluster_peers=",".join(peers) if peers else None,
        cluster_open=open_ or None,
        engine=engine,
        max_batch=max_batch,
        max_queue=max_queue,
        context_length=context_length,
        prefill_chunk=prefill_chunk,
        prefix_cache_bytes=prefix_cache_bytes,
        prefill_peers=",".join(prefill_peer) if prefill_peer else None,
        kv_port=kv_port,
        kv_codec=kv_codec,
        kv_bits=kv_bits,
        dtype=dtype,
        offline=offline or None,
    )
    if settings.host not in LOOPBACK and not settings.api_key and not open_:
        from tandem.errors import ConfigError

        raise ConfigError(
            f"Everyone who reaches {settings.host} could use this server. Set TANDEM_API_KEY to ask for a key, or say "
            "--open to serve without one.",
            param="host",
        )
    from tandem.cli.serving import serve_forever

    references = [] if no_models else models or ["demo"]
    serve_forever(settings, references, events=events, verbose=verbose, until_eof=until_eof)
