"""One case: compute here, have computed there, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.errors import HandoffError
from tandem.kv.client import Handoff
from tandem.kv.control import Progress
from tandem.kv.intervals import Span
from tandem.verify.cases import Case
from tandem.verify.compare import Bounds, LayerDifference, compare_arrays, compare_logits
from tandem.verify.report import (
    CaseResult,
    Divergence,
    Logits,
    Tokens,
    Transferred,
    compare_answers,
    first_wrong,
)

if TYPE_CHECKING:
    from tandem.engines.mlx.prefix_cache import PrefixCache
    from tandem.engines.mlx.workbench import Answer, Held, Workbench


class Rounding(NamedTuple):
    """How far equal computations may be apart when sums are added up in another order.

    Attributes:
        logits: largest difference of a logit.
        entries: of a cache entry, as a share of the largest of its part and layer.
    """

    logits: float
    entries: float


ROUNDING = {
    "float32": Rounding(1e-3, 1e-3),
    "float16": Rounding(0.25, 5e-2),
    "bfloat16": Rounding(1.0, 0.2),
}
"""By the dtype of the weights. Only where a prefix hit on either side cuts the prompt into other chunks."""
QUANTISED = {8: 16.0, 4: 256.0}
"""How many times that for a cache in so many bits, where rounding may move an entry by a whole step."""


class _Arrived(NamedTuple):
    """A hand-off's result.

    Attributes:
        server: the pieces that the prefill side computed the context in; None where nobody knows.
        remark: what to tell about that.
    """

    cache: list[Any]
    figures: Transferred
    server: list[Span] | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the prefill side has read for this case: so many leading tokens of the prompt, in these pieces."""

    shared: int = 0
    spans: tuple[Span, ...] | None = ()


class Verifier:
    """Runs cases against one prefill side.

    Args:
        bench: the decode side.
        handoff: to the prefill side.
        answer_tokens: greedy tokens to compare.
        tolerance: allowed difference of logits and, as a share, of entries where every bit should be equal.
        same_engine: the prefill side computes as this one does; another engine adds sums up in another order.
    """

    def __init__(
        self,
        bench: Workbench,
        handoff: Handoff,
        *,
        answer_tokens: int = 16,
        tolerance: float = 0.0,
        same_engine: bool = True,
    ) -> None:
        self._bench = bench
        self._handoff = handoff
        self._answer_tokens = answer_tokens
        self._tolerance = tolerance
        self._same_engine = same_engine

    def run(self, case: Case) -> CaseResult:
        """Verify one case. A hand-off that breaks off is a case that fails."""
        tokens = list(case.tokens)
        try:
            return self._run(case, tokens)
        except HandoffError as error:
            return _broken(case, len(tokens), error)

    def _run(self, case: Case, tokens: list[int]) -> CaseResult:
        bench = self._bench
        prefixes = bench.prefix_cache()
        held_spans: list[Span] | None = []
        if case.client:
            _, held_spans = bench.prefill(case.client, prefixes)
        known = self._warm_server(case)
        if case.follow:
            tokens, known = self._first_turn(tokens, list(case.follow), prefixes)
            held_spans = None
        held = bench.find(prefixes, tokens[:-1])
        local, local_spans = bench.prefill(tokens[:-1])
        arrived = self._arrive(tokens, held, known)
        exact = self._same_engine and _same_pieces(local_spans, arrived.server, held_spans, held.length)
        bounds = self._bounds(exact=exact)
        layers = self._compare(local, arrived.cache, len(tokens) - 1, bounds)
        ours, theirs = (bench.answer(cache, tokens[-1], self._answer_tokens) for cache in (local, arrived.cache))
        logits = Logits(*compare_logits(ours.logits[0], theirs.logits[0]), bounds.logits)
        answers = _answers(ours, theirs, bounds.logits)
        divergence = first_wrong(layers)
        if divergence is None and (
            logits.max_abs > bounds.logits or (exact and not (self._tolerance or logits.bit_equal))
        ):
            divergence = Divergence("logits")
        if divergence is None and answers.first_divergence is not None and not answers.tie:
            divergence = Divergence("answer", token=answers.first_divergence)
        result = CaseResult(
            case.name, len(tokens), held.length, exact, arrived.figures, layers, logits, answers, divergence
        )
        return replace(result, reason=_reason(result, arrived.remark, rounding_of(bench)))

    def _bounds(self, *, exact: bool) -> Bounds:
        if exact:
            return Bounds(True, self._tolerance, self._tolerance)
        rounding = rounding_of(self._bench)
        return Bounds(False, max(rounding.entries, self._tolerance), max(rounding.logits, self._tolerance))

    # ------------------------------------------------------------------------------------------------- the hand-offs

    def _warm_server(self, case: Case) -> _Known:
        """Have the prefill side read what it is to know."""
        if not case.server:
            return _Known()
        arrived = self._arrive([*case.server, 0], self._nothing(), _Known())
        fresh = arrived.server is not None and not arrived.figures.cached
        return _Known(case.shared, tuple(arrived.server) if fresh and arrived.server else None)

    def _first_turn(self, tokens: list[int], follow: list[int], prefixes: PrefixCache) -> tuple[list[int], _Known]:
        """Prompt and answer through a hand-off; the next prompt goes on from there, and both sides remember."""
        arrived = self._arrive(tokens, self._nothing(), _Known())
        answer = self._bench.answer(arrived.cache, tokens[-1], self._answer_tokens)
        prefixes.store([*tokens, *answer.tokens[:-1]], arrived.cache, tail=True)
        spans = None if arrived.server is None or arrived.figures.cached else tuple(arrived.server)
        return [*tokens, *answer.tokens, *follow], _Known(len(tokens) - 1, spans)

    def _nothing(self) -> Held:
        return self._bench.find(self._bench.prefix_cache(), [])

    def _arrive(self, tokens: Sequence[int], held: Held, known: _Known) -> _Arrived:
        """A cache for all of `tokens` but the last, from `held` and one hand-off, which is what a runner does.

        Raises:
            HandoffError: it broke off.
        """
        end = len(tokens) - 1
        if held.length >= end:
            why = "there is nothing to hand over" if end == 0 else "the decode side knows all of it"
            return _Arrived(held.cache, Transferred(), [], why)
        staging = self._bench.stage(held, end)
        seen: set[int] = set()
        transfer = self._handoff.transfer(tokens, staging, on_progress=lambda told: _note(told, seen))
        outcome = transfer.run()
        if outcome.error is not None:
            raise outcome.error if isinstance(outcome.error, HandoffError) else HandoffError(outcome.error.message)
        figures = Transferred(
            outcome.payload_bytes, outcome.seconds, outcome.computing, outcome.transferring, outcome.cached
        )
        server, remark = self._server_pieces(known, outcome.cached, end, staging.plan.checkpoints, seen)
        return _Arrived(self._bench.commit(held, staging, end), figures, server, remark)

    def _server_pieces(
        self, known: _Known, cached: int, end: int, points: Sequence[int], seen: set[int]
    ) -> tuple[list[Span] | None, str]:
        """In which pieces the prefill side computed the context, its prefix hit included."""
        if not self._same_engine:
            return None, "another engine rounds otherwise"
        fresh = self._bench.spans(cached, end, points)
        surprises = seen - {span.end for span in fresh} - {cached}
        if surprises:
            return None, (
                f"the prefill side cut the prompt at {min(surprises)}, which chunks of {self._bench.chunk} do not: "
                "give its own with --chunk, and let it be idle"
            )
        if not cached:
            return fresh, ""
        if cached > known.shared or known.spans is None:
            return None, f"the prefill side knew {cached} tokens from elsewhere"
        return [*(span for span in known.spans if span.start < cached), *fresh], ""

    # -------------------------------------------------------------------------------------------------- the comparison

    def _compare(self, local: list[Any], handed: list[Any], end: int, bounds: Bounds) -> tuple[LayerDifference, ...]:
        found: list[LayerDifference] = []
        for index, layer in enumerate(self._bench.layout.layers):
            if layer.kind == "state":
                pairs = zip(self._bench.states(local, index), self._bench.states(handed, index), strict=True)
                parts = [
                    compare_arrays(spec.name, ours, theirs, bounds, start=end, axis=None)
                    for spec, (ours, theirs) in zip(layer.states, pairs, strict=bool(end))
                ]
            else:
                parts = [
                    compare_arrays(spec.name, ours, theirs, bounds, start=span.start, axis=1, bits=layer.bits)
                    for span in layer.held(end)
                    for spec, ours, theirs in zip(
                        layer.parts,
                        self._bench.entries(local, index, span),
                        self._bench.entries(handed, index, span),
                        strict=True,
                    )
                ]
            if parts:
                found.append(LayerDifference(index, layer.kind, tuple(parts)))
        return tuple(found)


def rounding_of(bench: Workbench) -> Rounding:
    """What rounding may do to this model."""
    bits = {layer.bits for layer in bench.layout.layers if layer.bits}
    factor = max((QUANTISED.get(one, QUANTISED[4]) for one in bits), default=1.0)
    rounding = ROUNDING[bench.dtype]
    return Rounding(rounding.logits * factor, rounding.entries * factor)


def _note(told: Progress, seen: set[int]) -> None:
    if told.processed:
        seen.add(told.processed)


def _same_pieces(local: list[Span], server: list[Span] | None, held: list[Span] | None, start: int) -> bool:
    """Whether every token of the handed cache was computed in the same piece as here, which makes it bit for bit equal.

    Args:
        held: the pieces of the decode side's earlier prompt; of these it uses the first `start` tokens.
    """
    end = local[-1].end if local else 0
    if start and held != []:
        used = None if held is None else [span for span in held if span.start < start]
        if used is None or used != [span for span in local if span.start < start]:
            return False
    return start >= end or server == local


def _answers(ours: Answer, theirs: Answer, allowed: float) -> Tokens:
    first = compare_answers(ours.tokens, theirs.tokens)
    tie = False
    if first is not None:
        row = ours.logits[first]
        tie = bool(abs(float(row[ours.tokens[first]]) - float(row[theirs.tokens[first]])) <= allowed)
    return Tokens(tuple(ours.tokens), tuple(theirs.tokens), first, tie)


def _broken(case: Case, length: int, error: HandoffError) -> CaseResult:
    return CaseResult(
        case.name, length, 0, False, Transferred(), (), None, None, Divergence("handoff"), reason=error.message
    )


def _reason(result: CaseResult, remark: str, rounding: Rounding) -> str:
    if result.first_divergence is not None:
        if not result.exact:
            return f"{result.first_divergence}: more than rounding explains"
        logits, tokens = result.logits, result.tokens
        hint = ""
        if logits and logits.max_abs <= rounding.logits and tokens and tokens.equal:
            hint = (
                ", and logits and answer are within rounding. If the other side computes in other chunks or on another "
                "processor, say so with --chunk or --tolerance"
            )
        return f"{result.first_divergence}: every bit should be equal{hint}"
    if result.tokens is not None and result.tokens.tie:
        position = result.tokens.first_divergence
        return f"the answers part at token {position}, where two tokens are equally likely within rounding"
    return remark
