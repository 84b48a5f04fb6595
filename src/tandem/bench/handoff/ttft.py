"""Time to the first token when the link is as slow as the prefill, half as slow, twice as slow.

`tandem up` prefills, the decoder (see there) decodes, and between the two stands the throttling proxy. The link's rate
is set from the seconds that the prefill of the hand-off before took, so it follows a machine whose speed drifts; the
bound is computed from the computing seconds that the peer reports for the measured hand-off itself.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tandem.bench.handoff.children import Child
from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.report import FirstToken, LinkResult
from tandem.bench.netns import Machine
from tandem.bench.processes import HOST, ServerProcess, free_port
from tandem.bench.prompts import PromptMaker
from tandem.bench.report import Series
from tandem.bench.serve import Say
from tandem.errors import EngineError

ANSWER_SECONDS = 300.0
MOST = 0.95
"""Share of a prompt that has to come from the peer."""
SECRET = "the bench's own secret"
"""Between machines the KV plane speaks TLS."""


def prefill_node(folder: Path, work: Path, *, chunk: int, machine: Machine | None = None) -> tuple[ServerProcess, int]:
    """`tandem up` with a KV port, not started yet, and that port.

    Args:
        machine: to run it on; None runs it here, for this machine alone.
    """
    port, kv_port = free_port(), free_port()
    command = [sys.executable, "-m", "tandem.cli", "up", str(folder), "--host", HOST, "--port", str(port), "--json"]
    environment = {
        "TANDEM_HOME": str(work / "prefill-home"),
        "TANDEM_API_KEY": "",
        "TANDEM_OFFLINE": "true",
        "TANDEM_KV_HOST": machine.address if machine else HOST,
        "TANDEM_KV_PORT": str(kv_port),
        "TANDEM_PREFILL_CHUNK": str(chunk),
        "TANDEM_PREFILL_PEERS": "",
        "TANDEM_CLUSTER_SECRET": SECRET if machine else "",
    }
    if machine:
        command = [*machine.prefix, *command]
    log, connect = work / "prefill.log", machine.connect if machine else None
    return ServerProcess("the prefill node", command, port, environment, log, connect=connect), kv_port


def decode_engine(folder: Path, work: Path, *, chunk: int, peer: str, machine: Machine | None = None) -> Child:
    """The decoder, not started yet.

    Args:
        peer: the KV port that prefills, `host:port`.
        machine: to run it on; None runs it here.
    """
    options = {
        "engine": "mlx",
        "model_id": "bench",
        "path": str(folder),
        "prefill_chunk": chunk,
        "prefill_peers": [{"address": peer}],
        "cluster_secret": SECRET if machine else "",
        "node_id": "bench-decoder",
    }
    prefix = machine.prefix if machine else ()
    return Child("the decode engine", "tandem.bench.handoff.decoder", options, work / "decoder.log", prefix=prefix)


@dataclass(slots=True)
class Samples:
    """Hand-offs over links of one relative speed."""

    rates: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)

    def add(self, rate: float, ttft: float, prefill: float, nbytes: int) -> None:
        """One hand-off of `nbytes` over a link of `rate`."""
        self.rates.append(rate)
        self.ttft.append(ttft)
        self.prefill.append(prefill)
        self.transfer.append(nbytes / rate)

    def result(self, relative: float) -> LinkResult:
        """Summarise at least one hand-off."""
        rows = list(zip(self.ttft, self.prefill, self.transfer, strict=True))
        return LinkResult(
            relative=relative,
            link_bytes_per_second=Series.of(self.rates),
            ttft=Series.of(self.ttft),
            prefill=Series.of(self.prefill),
            transfer=Series.of(self.transfer),
            ttft_over_bound=Series.of([ttft / max(prefill, transfer) for ttft, prefill, transfer in rows]),
            exposed=Series.of([ttft - prefill for ttft, prefill, _ in rows]),
            overlap_efficiency=Series.of(
                [
                    (prefill + transfer - ttft) / (prefill + transfer - max(prefill, transfer))
                    for ttft, prefill, transfer in rows
                ]
            ),
            link_efficiency=Series.of([transfer / ttft for ttft, _, transfer in rows]),
        )


async def measure_ttft(plan: HandoffPlan, folder: Path, work: Path, say: Say) -> FirstToken:
    """Hand prompts off over links of several speeds, in turns.

    Raises:
        TandemError: a process did not start, a hand-off failed, or the link carried fewer bytes than the entries have.
    """
    prompts = PromptMaker(folder)
    samples = {relative: Samples() for relative in plan.links}
    async with AsyncExitStack() as stack:
        say("starting the prefill node, the link and the decode engine")
        server, kv_port = prefill_node(folder, work, chunk=plan.ttft_chunk)
        await stack.enter_async_context(server)
        link = await stack.enter_async_context(
            Child("the link", "tandem.bench.handoff.throttle", {"target": kv_port}, work / "link.log")
        )
        decoder = await stack.enter_async_context(
            decode_engine(folder, work, chunk=plan.ttft_chunk, peer=f"{HOST}:{link.ready['port']}")
        )
        nbytes: int = (await decoder.ask({"measure": plan.ttft_tokens - 1}))["bytes"]
        prefill = 0.0
        for number in range(2):
            say("measuring the prefill")
            tokens = prompts.token_ids(f"first token, warm-up {number}", plan.ttft_tokens)
            prefill = (await hand_off(decoder, tokens))[1]
        for number in range(plan.rounds):
            for relative in plan.links:
                say(f"round {number + 1} of {plan.rounds}: first token, transfer {relative:g} times as long as prefill")
                rate = nbytes / (prefill * relative)
                before = (await link.ask({"rate": rate}))["carried"]
                tokens = prompts.token_ids(f"first token {number} {relative}", plan.ttft_tokens)
                ttft, prefill, moved = await hand_off(decoder, tokens)
                carried = (await link.ask({}))["carried"] - before
                if carried < moved:
                    raise EngineError(f"The link carried {carried} bytes of {moved}: the hand-off took another way.")
                samples[relative].add(rate, ttft, prefill, moved)
    links = [samples[relative].result(relative) for relative in sorted(plan.links)]
    return FirstToken(nbytes, next(one.ttft_over_bound for one in links if one.relative == 1.0), links)


async def hand_off(decoder: Child, tokens: list[int]) -> tuple[float, float, int]:
    """Seconds to the first token, and of the peer's computing; bytes of entries.

    Raises:
        EngineError: it failed, or not all of the prompt came from the peer.
    """
    statistics = (await decoder.ask({"tokens": tokens, "max_tokens": 1}, ANSWER_SECONDS))["statistics"]
    handoff = statistics["handoff"]
    # Prompts may begin with the same word, which the prefix cache then has.
    if handoff["remote_tokens"] < MOST * len(tokens):
        raise EngineError(f"Only {handoff['remote_tokens']} of {len(tokens) - 1} tokens came from the peer.")
    return statistics["ttft_seconds"], handoff["computing_seconds"], handoff["bytes"]
