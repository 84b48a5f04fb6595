"""A whole verification: cases planned for the loaded model, run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.errors import ConfigError, ContextTooLongError
from tandem.kv.client import Handoff
from tandem.kv.peer import ClientOptions
from tandem.kv.tls import identity_for
from tandem.verify.cases import Case, Sizes, plan_cases
from tandem.verify.check import Verifier
from tandem.verify.prompts import PromptSource
from tandem.verify.report import Report
from tandem.verify.side import Address

if TYPE_CHECKING:
    from tandem.engines.mlx.workbench import Workbench


@dataclass(frozen=True, slots=True)
class Wish:
    """What to verify.

    Attributes:
        prompts: texts of the user's own.
        lengths: of the cold prompts, instead of those around boundaries.
        quick: a small set of cases.
        answer_tokens: greedy tokens to compare.
        tolerance: see `Verifier`.
        seed: of the generated prompts.
        same_engine: see `Verifier`.
    """

    prompts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    quick: bool = False
    answer_tokens: int = 16
    tolerance: float = 0.0
    seed: int = 0
    same_engine: bool = True


@dataclass(frozen=True, slots=True)
class Peer:
    """The prefill side.

    Attributes:
        name: for people.
        secret: the cluster's, empty for none; `node_id` is then this machine's name in its certificate.
        open: connect beyond loopback without a secret.
    """

    name: str
    address: Address
    secret: str = ""
    node_id: str = ""
    open: bool = False


def cases_for(bench: Workbench, wish: Wish) -> list[Case]:
    """The cases for a loaded model.

    Raises:
        ContextTooLongError: a prompt does not fit the model's context.
        ConfigError: the context has no room for any case, or there is an empty prompt.
    """
    text = bench.text
    longest = bench.context_length - 2 * wish.answer_tokens
    if longest < 8:
        raise ConfigError(
            f"A context of {bench.context_length} tokens has no room for prompts and answers of {wish.answer_tokens} "
            "tokens. Ask for fewer --tokens."
        )
    own = [text.encode(prompt, add_special_tokens=True) for prompt in wish.prompts]
    for length in (*wish.lengths, *(len(tokens) for tokens in own)):
        if length > longest:
            raise ContextTooLongError(
                f"A prompt of {length} tokens and its answers do not fit the context of {bench.context_length}. "
                f"Give at most {longest} tokens."
            )
    if not all(own):
        raise ConfigError("An empty prompt has no token to verify anything with. Give --prompt some text.")
    sizes = Sizes.of(bench.layout, bench.chunk, bench.checkpoint, longest)
    source = PromptSource(text.encode, set(range(text.token_count)) - text.special_ids, wish.seed)
    return plan_cases(sizes, source, own=own, lengths=wish.lengths, quick=wish.quick, answer=wish.answer_tokens)


def verify(bench: Workbench, model: str, peer: Peer, wish: Wish, report: Callable[[int, int, str], None]) -> Report:
    """Run every case.

    Args:
        report: called with (cases done, cases, name of the next one).

    Raises:
        HandoffError: the peer cannot be reached, or serves another model, which the message names.
        ConfigError: the peer is on another machine, and there is no cluster secret.
    """
    cases = cases_for(bench, wish)
    handoff = Handoff(
        peer.address,
        bench.fingerprint,
        identity=identity_for(peer.secret, peer.node_id),
        options=ClientOptions(open=peer.open, node=peer.node_id),
    )
    try:
        handoff.connect()
        verifier = Verifier(
            bench,
            handoff,
            answer_tokens=wish.answer_tokens,
            tolerance=wish.tolerance,
            same_engine=wish.same_engine,
        )
        results = []
        for number, case in enumerate(cases):
            report(number, len(cases), case.name)
            results.append(verifier.run(case))
        report(len(cases), len(cases), "")
    finally:
        handoff.close()
    digest = bench.fingerprint.digest().hex()
    return Report(model, peer.name, bench.dtype, bench.chunk, wish.seed, digest, tuple(results))
