"""Time to the first token over a cable: prefill node and decode engine on machines of their own.

The machines are network namespaces, the kernel slows the cable down to the planned rate, both ways, and the two sides
share a secret, so that the entries travel over TLS. Decode engine, figures and bound are those of the section `ttft`.
One thing differs: the rate is the cable's, which has the headers of Ethernet, IP, TCP and TLS to carry as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.replaying import record, replay_node
from tandem.bench.handoff.report import FirstToken, LinkResult
from tandem.bench.handoff.ttft import SECRET, Samples, decode_engine, hand_off, prefill_node
from tandem.bench.netns import Machine, Network, missing
from tandem.bench.prompts import PromptMaker
from tandem.bench.serve import Say
from tandem.errors import EngineError, UnsupportedError

WARM_UP_TOKENS = 300


def check_machines() -> None:
    """Refuse where machines cannot be made.

    Raises:
        UnsupportedError: with the reason.
    """
    if reason := missing():
        raise UnsupportedError(
            f"The section link runs on two machines made of network namespaces, and here {reason}. Leave it out of "
            "--only: the section ttft measures the same over a proxy."
        )


async def measure_link(plan: HandoffPlan, folder: Path, work: Path, say: Say) -> FirstToken:
    """Hand prompts off over the cable: computed by `tandem up`, then replayed as fast as the cable is.

    Raises:
        TandemError: machines cannot be made here (`check_machines` tells before), a process did not start, a hand-off
            failed, or the cable carried fewer bytes than the entries have.
    """
    with Network() as network:
        there, here = network.machine("prefill"), network.machine("decode")
        for machine in (there, here):
            machine.rate(plan.link_megabits)
        cable = Cable(plan, folder, work, say, there, here)
        links = [await cable.computed(), await cable.replayed()]
    return FirstToken(cable.payload_bytes, links[0].ttft_over_bound, links)


class Cable:
    """Hand-offs from one machine to another. Each kind has processes of its own, which end before the next one's begin.

    Attributes:
        payload_bytes: of the last hand-off.
    """

    def __init__(self, plan: HandoffPlan, folder: Path, work: Path, say: Say, there: Machine, here: Machine) -> None:
        self.payload_bytes = 0
        self._plan = plan
        self._folder = folder
        self._work = work
        self._say = say
        self._there = there
        self._here = here
        self._rate = plan.link_megabits * 1e6 / 8
        self._prompts = PromptMaker(folder)

    async def computed(self) -> LinkResult:
        """Of prompts that `tandem up` reads meanwhile."""
        async with AsyncExitStack() as stack:
            self._say("starting the prefill node and the decode engine, on a machine each")
            server, port = prefill_node(self._folder, self._work, chunk=self._plan.ttft_chunk, machine=self._there)
            await stack.enter_async_context(server)
            return await self._measure(stack, port, self._tokens("computed"))

    async def replayed(self) -> LinkResult:
        """Of prompts whose entries are ready as fast as the cable carries them, and cost their machine nothing."""
        prompts = self._tokens("replayed")
        node = replay_node(
            self._folder,
            self._rate,
            self._work / "link-replay.log",
            prefix=self._there.prefix,
            prefill_chunk=self._plan.ttft_chunk,
            kv_host=self._there.address,
            cluster_secret=SECRET,
            node_id="bench-replay",
        )
        async with AsyncExitStack() as stack:
            self._say("starting the replaying node")
            await stack.enter_async_context(node)
            self._say("recording a prefill")
            await record(node, prompts[-1])
            return await self._measure(stack, node.ready["port"], prompts)

    def _tokens(self, label: str) -> list[list[int]]:
        """A short prompt to warm up with, and one a round."""
        lengths = [WARM_UP_TOKENS, *[self._plan.ttft_tokens] * self._plan.rounds]
        return [self._prompts.token_ids(f"link {label} {number}", length) for number, length in enumerate(lengths)]

    async def _measure(self, stack: AsyncExitStack, port: int, prompts: Sequence[list[int]]) -> LinkResult:
        peer, chunk = f"{self._there.address}:{port}", self._plan.ttft_chunk
        decoder = await stack.enter_async_context(
            decode_engine(self._folder, self._work, chunk=chunk, peer=peer, machine=self._here)
        )
        samples = Samples()
        self._say("warming up")
        await hand_off(decoder, prompts[0])
        for number, tokens in enumerate(prompts[1:], 1):
            self._say(f"round {number} of {self._plan.rounds}: first token over {self._plan.link_megabits:g} Mbit/s")
            before = self._there.sent()
            ttft, prefill, moved = await hand_off(decoder, tokens)
            carried = self._there.sent() - before
            if carried < moved:
                raise EngineError(f"The cable carried {carried} bytes of {moved}: the hand-off took another way.")
            samples.add(self._rate, ttft, prefill, moved)
            self.payload_bytes = moved
        return samples.result(sum(samples.transfer) / sum(samples.prefill))
