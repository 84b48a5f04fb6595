"""Pieces of the hand-off bench: arithmetic, memory, recorded prefills, programs of its own."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tandem.bench.environment import describe
from tandem.bench.handoff.children import Child
from tandem.bench.handoff.itl import Window, divide, p95
from tandem.bench.handoff.peak import PeakMemory, settle
from tandem.bench.handoff.plan import BOUNDS, EVERYWHERE, HandoffPlan, parse_sections
from tandem.bench.handoff.plot import svg
from tandem.bench.handoff.replay import ReplayProducer
from tandem.bench.handoff.report import FirstToken, HandoffReport, Throughput, TokenGaps
from tandem.bench.handoff.report import PeakMemory as PeakResult
from tandem.bench.handoff.table import bars, show
from tandem.bench.handoff.ttft import Samples
from tandem.bench.report import Series
from tandem.errors import ConfigError, EngineError, InvalidRequestError
from tandem.kv.client import Handoff
from tandem.kv.job import PrefillJob
from tandem.kv.plan import Plan, Wanted
from tandem.kv.server import PrefillServer
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticProducer
from tests.kv.layouts import LAYOUTS, fingerprint


def series(*values: float) -> Series:
    return Series.of(values)


def report(
    *,
    socket: float = 0.7,
    tls: float = 0.9,
    ttft: float = 1.05,
    itl: float = 1.1,
    peak: float = 1.1,
    cable: float = 1.1,
) -> HandoffReport:
    samples = {relative: Samples() for relative in (0.5, 1.0, 2.0)}
    for relative, one in samples.items():
        transfer = 2.0 * relative
        one.add(100e6 / transfer, ttft * max(2.0, transfer), 2.0, 100_000_000)
    links = [one.result(relative) for relative, one in samples.items()]
    one = series(1.0)
    return HandoffReport(
        HandoffPlan(),
        describe(0.5),
        Throughput(1000, series(socket), series(tls), series(0.2), {"plane": series(1e9), "socket": series(2e9)}),
        FirstToken(100_000_000, links[1].ttft_over_bound, links),
        TokenGaps(1000, series(itl), one, one, one, one, one, one, one, one, one),
        PeakResult(1000, series(peak), series(peak), one, one, one, "VmHWM"),
        FirstToken(100_000_000, series(cable), links[:2]),
    )


def test_the_report_holds_its_figures_to_their_bounds() -> None:
    assert report().missed == {}
    assert set(report(socket=0.5, tls=0.7, ttft=1.2, itl=1.3, peak=2.0, cable=1.2).missed) == set(BOUNDS)
    assert set(report(peak=1.2).missed) == {"peak_over_kv"}


def test_the_json_object_has_the_figures_at_its_top() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(report(itl=1.5).to_json()))
    assert plain["socket_ratio"] == 0.7
    assert plain["peer_protocol_ratio"] == 0.2
    assert plain["ttft_over_bound"] == pytest.approx(1.05)
    assert set(plain["bounds"]) == set(plain["passed"]) == set(BOUNDS)
    assert [name for name, passed in plain["passed"].items() if not passed] == ["itl_ratio"]
    assert [link["relative"] for link in plain["ttft"]["links"]] == [0.5, 1.0, 2.0]
    assert plain["plan"]["sections"] == list(EVERYWHERE)
    assert plain["environment"]["load_before"] == 0.5


def test_what_was_left_out_has_no_figure() -> None:
    plain = HandoffReport(HandoffPlan(sections=("memory",)), describe(0.0)).to_json()
    assert not set(BOUNDS) & set(plain)
    assert plain["bounds"] == plain["passed"] == {}


def test_overlap_is_measured_between_serial_and_bound() -> None:
    one = Samples()
    one.add(rate=50.0, ttft=2.5, prefill=2.0, nbytes=100)
    one.add(rate=50.0, ttft=4.0, prefill=2.0, nbytes=100)
    one.add(rate=100.0, ttft=2.0, prefill=2.0, nbytes=100)
    result = one.result(1.0)
    assert result.ttft_over_bound.rounds == [1.25, 2.0, 1.0]
    assert result.overlap_efficiency.rounds == [0.75, 0.0, 1.0]
    assert result.exposed.rounds == [0.5, 2.0, 0.0]
    assert result.link_efficiency.rounds == [0.8, 0.5, 0.5]


def test_the_table_says_what_was_met_and_draws_the_links() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    show(report(peak=2.0), console)
    text = console.export_text()
    assert text.count("missed") == 1
    assert "≤ 1.15" in text
    assert "over a cable of 1000 Mbit/s" in text
    assert "load average 0.50 before" in text
    drawn = bars(report(ttft=1.5).ttft or pytest.fail("no links")).plain.splitlines()[2:]
    assert len(drawn) == 3
    assert all("█" in line and "▒" in line for line in drawn)


def test_the_picture_is_well_formed_and_has_every_hand_off() -> None:
    result = report().ttft
    assert result is not None
    root = ElementTree.fromstring(svg(result))
    circles = [one for one in root.iter() if one.tag.endswith("circle")]
    assert len(circles) == 3
    box = [float(number) for number in root.attrib["viewBox"].split()]
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < box[2]
        assert 0 < float(circle.attrib["cy"]) < box[3]


def test_gaps_that_touch_the_window_count_as_receiving() -> None:
    times = [[0.0, 1.0, 2.0, 3.5, 4.0, 4.25], [0.5, 2.5]]
    gaps = divide(times, Window(began=1.5, committed=3.0, answered=4.0))
    assert sorted(gaps.receiving) == [1.0, 1.5, 2.0]
    assert gaps.joining == [0.5]
    assert sorted(gaps.otherwise) == [0.25, 1.0]
    assert gaps.window == 1.5
    assert p95([float(number) for number in range(101)]) == 95.0


def test_sections_are_named_with_commas() -> None:
    assert parse_sections("itl, throughput,itl") == ("throughput", "itl")
    for wrong in ("", "speed", "itl,speed"):
        with pytest.raises(ConfigError, match="--only"):
            parse_sections(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"ttft_tokens": 10},
        {"itl_rate": 0.0},
        {"links": (0.5,)},
        {"links": (1.0, 0.0)},
        {"link_megabits": 0},
    ],
)
def test_a_plan_that_measures_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        HandoffPlan(**wrong).check()  # type: ignore[arg-type]
    HandoffPlan().check()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_peak_is_seen_after_it_is_gone(sampled: bool) -> None:
    settle()
    watch = PeakMemory(sampled=sampled)
    assert watch.method == "sampled" or sys.platform == "linux"
    size = 96 << 20
    held = np.ones(size, np.uint8)
    if sampled:
        while watch.peak() < watch.baseline + size // 2:
            pass
    del held
    above = watch.peak() - watch.baseline
    watch.close()
    assert size * 0.9 < above < size * 1.5
    again = PeakMemory(sampled=sampled)
    assert again.peak() - again.baseline < size // 2
    again.close()


def test_a_recording_is_replayed_to_the_byte() -> None:
    layout = LAYOUTS["attention"]
    tokens = list(range(300))
    source = SyntheticProducer(layout, chunk=100)
    job = PrefillJob(Plan(layout, Wanted(0, 300)), np.array(tokens, np.uint32))
    source.produce(job)
    items = []
    while (item := job.take()) is not None:
        items.append(item)
    source.close()
    producer = ReplayProducer(rate=1e9)
    producer.keep(len(tokens), items)
    with PrefillServer(producer, layout, fingerprint(layout)) as server:
        client = Handoff(server.address, fingerprint(layout))
        for start in (0, 37):
            staging = Staging(layout, Wanted(start, 300))
            outcome = client.transfer(tokens, staging).run()
            assert outcome.error is None
            for layer, spec in enumerate(layout.layers):
                for part in range(len(spec.parts)):
                    expected = source.cache.entries(np.array(tokens, np.uint32), layer, part, start, 300)
                    np.testing.assert_array_equal(staging.entries(layer, part, start, 300), expected)
        shorter = Staging(layout, Wanted(0, 150))
        assert client.transfer(tokens[:150], shorter).run().error is None
        expected = source.cache.entries(np.array(tokens[:150], np.uint32), 0, 0, 0, 150)
        np.testing.assert_array_equal(shorter.entries(0, 0, 0, 150), expected)
        refused = client.transfer([*tokens, 5], Staging(layout, Wanted(0, 301))).run()
        assert refused.complete == 0
        assert "was recorded" in str(refused.error)
        client.close()


def test_a_prompt_longer_than_what_was_recorded_is_refused() -> None:
    layout = LAYOUTS["attention"]
    job = PrefillJob(Plan(layout, Wanted(0, 3)), np.arange(3, dtype=np.uint32))
    with pytest.raises(InvalidRequestError, match="was recorded"):
        ReplayProducer(1.0).submit(job)


def test_programs_answer_fail_and_end(tmp_path: Path) -> None:
    async def talk() -> None:
        async with Child("the link", "tandem.bench.handoff.throttle", {"target": 9}, tmp_path / "log") as child:
            assert child.ready["port"] > 0
            assert (await child.ask({"rate": 5e6}, 30))["carried"] == 0
            with pytest.raises(EngineError, match="ended before it answered"):
                await child.ask({"rate": "fast"}, 30)
        with pytest.raises(EngineError, match="the link ended"):
            async with Child("the link", "tandem.bench.handoff.throttle", {}, tmp_path / "log"):
                pass

    asyncio.run(talk())
