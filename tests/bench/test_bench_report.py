"""From rounds to figures."""

from __future__ import annotations

import msgspec
import pytest

from tandem.bench.client import Answer
from tandem.bench.environment import describe
from tandem.bench.plan import BOUNDS, Bound, Plan, parse_streams
from tandem.bench.report import Comparison, Delay, Report, Series, SimLoad, ratios
from tandem.bench.rounds import Batch
from tandem.bench.serve import Pairs
from tandem.errors import ConfigError, EngineError


def answer(text: str = "a b", *, prompt: int = 200, tokens: int = 11, cached: int = 0, start: float = 0.0) -> Answer:
    return Answer(
        started=start,
        first_text=start + 0.5,
        last_text=start + 1.5,
        ended=start + 2.0,
        text=text,
        chunks=tokens,
        finish_reason="length",
        prompt_tokens=prompt,
        completion_tokens=tokens,
        cached_tokens=cached,
    )


def batch(seconds: float, *answers: Answer) -> Batch:
    return Batch(answers or (answer(),), seconds, server_cpu=0.022, children_cpu=0.11, client_cpu=0.0011)


def series(value: float) -> Series:
    return Series.of([value])


def test_a_series_keeps_its_rounds_in_order() -> None:
    assert Series.of([3.0, 1.0, 2.0]) == Series(median=2.0, low=1.0, high=3.0, rounds=[3.0, 1.0, 2.0])
    assert Series.of([1.0, 2.0]).median == 1.5


def test_ratios_are_taken_round_by_round() -> None:
    # The second round ran on a machine half as fast: no ratio notices.
    assert ratios([20.0, 10.0, 30.0], [10.0, 5.0, 10.0]).rounds == [2.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_a_batch_counts_all_answers_over_the_whole_time() -> None:
    one = batch(4.0, answer(tokens=11), answer(tokens=9))
    assert one.tokens == 20
    assert one.tokens_per_second == 5.0
    assert one.decode_tokens_per_second == pytest.approx((10 + 8) / 2)
    assert one.ttft == 0.5
    assert one.server_cpu_ms_per_token == pytest.approx(1.1)
    assert one.cpu_ms_per_token == pytest.approx(6.6)
    assert one.events_per_token == 1.0


def test_a_comparison_divides_tandem_by_mlx_lm() -> None:
    comparison = Comparison.of(8, [batch(1.0), batch(2.0)], [batch(2.0), batch(2.0)])
    assert comparison.ratio.rounds == [2.0, 1.0]
    assert comparison.tandem.tokens_per_second.high == 11.0
    assert comparison.mlx_lm.ttft_ms.median == 500.0


@pytest.mark.parametrize(
    ("bound", "figure", "met"),
    [
        (Bound("at_least", 0.95), 0.95, True),
        (Bound("at_least", 0.95), 0.949, False),
        (Bound("at_most", 1.05), 1.05, True),
        (Bound("at_most", 1.05), 1.051, False),
    ],
)
def test_bounds(bound: Bound, figure: float, met: bool) -> None:
    assert bound.met_by(figure) is met


def report(ratio_1: float, ratio_8: float, ttft: float, cpu: float) -> Report:
    def throughput(streams: int, ratio: float) -> Comparison:
        return Comparison.of(streams, [batch(1.0)], [batch(ratio)])

    delay = Delay(series(ttft), series(50.0), series(50.0), [0], [0])
    sim = SimLoad(64, 200, 1920.0, series(1900.0), series(1.0), series(cpu), series(0.03), series(0.02))
    throughputs = [throughput(1, ratio_1), throughput(8, ratio_8)]
    return Report(Plan(), describe(0.5), throughput=throughputs, ttft=delay, sim=sim)


def test_the_report_holds_its_figures_to_their_bounds() -> None:
    assert report(0.95, 1.05, 1.05, 0.15).missed == {}
    assert set(report(0.9, 1.0, 1.1, 0.2).missed) == set(BOUNDS)
    assert set(report(1.0, 1.0, 1.0, 0.1).missed) == {"throughput_ratio_8"}


def test_the_json_object_has_the_figures_at_its_top() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(report(1.0, 1.0, 1.02, 0.1).to_json()))
    assert plain["throughput_ratio_1"] == 1.0
    assert plain["throughput_ratio_8"] == 1.0
    assert plain["ttft_ratio"] == 1.02
    assert plain["server_cpu_ms_per_token"] == 0.1
    assert plain["bounds"]["throughput_ratio_8"] == {"kind": "at_least", "value": 1.05}
    assert plain["passed"]["throughput_ratio_1"] is True
    assert plain["passed"]["throughput_ratio_8"] is False
    assert plain["throughput"][1]["tandem"]["tokens_per_second"]["rounds"] == [11.0]
    assert plain["environment"]["cores"] >= 1
    assert plain["environment"]["load_before"] == 0.5
    assert plain["plan"]["rounds"] == Plan().rounds


def test_what_was_left_out_has_no_figure() -> None:
    plain = Report(Plan(), describe(0.0)).to_json()
    assert not set(BOUNDS) & set(plain)
    assert plain["bounds"] == plain["passed"] == {}


def test_agreement_counts_equal_texts_short_answers_and_cached_tokens() -> None:
    pairs = Pairs()
    pairs.add(batch(1.0, answer(" x"), answer("y", tokens=5)), batch(1.0, answer("x", cached=3), answer("z", tokens=5)))
    agreement = pairs.agreement(11)
    assert (agreement.answers, agreement.equal_texts, agreement.short, agreement.cached_tokens) == (2, 1, 2, 3)


def test_servers_that_read_different_prompts_are_not_compared() -> None:
    pairs = Pairs()
    pairs.add(batch(1.0, answer(prompt=200)), batch(1.0, answer(prompt=201)))
    with pytest.raises(EngineError, match="tokenise"):
        pairs.agreement(11)


def test_streams_are_numbers_with_commas() -> None:
    assert parse_streams("1,8") == (1, 8)
    assert parse_streams(" 4, 2,4") == (4, 2)
    with pytest.raises(ConfigError, match="streams"):
        parse_streams("one")


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"streams": ()}, {"streams": (0,)}, {"tokens": 1}, {"prompt_tokens": 3}, {"sim_streams": 0}],
)
def test_a_plan_that_measures_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Plan(**wrong).check()  # type: ignore[arg-type]
    Plan().check()
