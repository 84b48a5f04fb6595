"""The bench of disaggregation without any process: plans from files and options, and from answers to figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tandem.bench.client import Answer
from tandem.bench.environment import describe
from tandem.bench.pd import config, sides
from tandem.bench.pd.bench import Prompts, turn
from tandem.bench.pd.config import Options, make_plan, parse_lengths
from tandem.bench.pd.plan import Case, PdPlan, SidePlan
from tandem.bench.pd.plot import svg
from tandem.bench.pd.report import ARRANGEMENTS, Arrangement, CaseResult, PdReport, Round
from tandem.bench.pd.sides import Side, check_two, up
from tandem.bench.pd.table import show
from tandem.bench.processes import HOST
from tandem.errors import ConfigError

REMOTE = {"prefill": "remote", "reason": "sooner", "codec": "raw", "bytes": 1000, "exposed_seconds": 0.25}
LOCAL = {"prefill": "local", "reason": "This node is predicted to be ready sooner."}


def answer(ttft: float, *, text: str = "a", cached: int = 0, total: float = 10.0, **handoff: Any) -> Answer:
    return Answer(
        started=100.0,
        first_text=100.0 + ttft,
        last_text=100.0 + total,
        ended=100.0 + total,
        text=text,
        chunks=4,
        finish_reason="length",
        prompt_tokens=2000,
        completion_tokens=4,
        cached_tokens=cached,
        statistics={"generation_tps": 8.0, "handoff": handoff or LOCAL},
    )


def one_round(together: float, decode: float, reading: float, /, **more: Any) -> Round:
    handoff = REMOTE | {"remote_tokens": 1999, "local_tokens": 1} | more
    return Round(
        {
            "disaggregated": answer(together, total=5.0, **handoff),
            "decode_alone": answer(decode, total=20.0),
            "prefill_alone": answer(reading, total=15.0),
        }
    )


def replaced(one: Round, name: Arrangement, new: Answer) -> Round:
    return Round({**one.answers, name: new})


LONG = Case(2000, 4)


def test_speedups_are_taken_round_by_round() -> None:
    # The second round ran on a machine half as fast: no ratio notices.
    result = CaseResult.of(LONG, [one_round(2.0, 6.0, 1.0), one_round(4.0, 12.0, 2.0)])
    assert result.ttft_speedup_vs_decode_alone is not None
    assert result.ttft_speedup_vs_decode_alone.rounds == [3.0, 3.0]
    assert result.ttft_speedup_vs_prefill_alone is not None
    assert result.ttft_speedup_vs_prefill_alone.rounds == [0.5, 0.5]
    assert result.total_speedup_vs_decode_alone is not None
    assert result.total_speedup_vs_decode_alone.median == 4.0
    assert result.total_speedup_vs_prefill_alone is not None
    assert result.total_speedup_vs_prefill_alone.median == 3.0
    assert result.decode_alone.ttft_seconds.rounds == [6.0, 12.0]
    assert (result.prefill, result.codec, result.texts_equal) == ("remote", "raw", True)
    assert (result.remote_tokens, result.remote_token_share) == (3998, 0.9995)
    assert (result.bytes.median, result.exposed_seconds.median) == (1000.0, 0.25)
    assert result.not_compared == []


@pytest.mark.parametrize("prefill", ["local", "partial"])
def test_what_was_not_remote_is_no_speedup(prefill: str) -> None:
    read = {"prefill": prefill, "remote_tokens": 500 if prefill == "partial" else 0, "reason": "It broke off."}
    result = CaseResult.of(LONG, [one_round(2.0, 6.0, 1.0), one_round(2.0, 6.0, 1.0, **read)])
    assert result.ttft_speedup_vs_decode_alone is result.ttft_speedup_vs_prefill_alone is None
    assert result.total_speedup_vs_decode_alone is result.total_speedup_vs_prefill_alone is None
    assert (result.prefill, result.reason) == (prefill, "It broke off.")
    assert result.not_compared == [f"disaggregated: the prompt was read {prefill}. It broke off."]
    assert result.remote_token_share < 0.99


def test_neither_is_what_was_not_alone_or_came_from_a_cache() -> None:
    whole = one_round(2.0, 6.0, 1.0)
    helped = replaced(whole, "decode_alone", answer(6.0, **REMOTE))
    assert CaseResult.of(LONG, [helped]).not_compared == ["decode_alone: the prompt was read remote. sooner"]
    cached = replaced(whole, "prefill_alone", answer(1.0, cached=128))
    result = CaseResult.of(LONG, [cached])
    assert result.not_compared == ["prefill_alone: 128 prompt tokens came from a prefix cache."]
    assert result.ttft_speedup_vs_prefill_alone is None


def test_other_texts_are_told() -> None:
    whole = one_round(2.0, 6.0, 1.0)
    result = CaseResult.of(LONG, [whole, replaced(whole, "prefill_alone", answer(1.0, text="b"))])
    assert (result.texts_equal, result.equal_to_decode_alone, result.equal_to_prefill_alone) == (False, 2, 1)
    assert result.ttft_speedup_vs_decode_alone is not None


def plan(prefill: SidePlan, decode: SidePlan, *cases: Case) -> PdPlan:
    return PdPlan(prefill, decode, cases=cases or (Case(500, 4), LONG), rounds=1)


VLLM, MLX = SidePlan("vllm"), SidePlan("mlx")


def report(one: PdPlan, *speedups: float, **more: Any) -> PdReport:
    results = [
        CaseResult.of(case, [one_round(1.0, speedup, 0.9, remote_tokens=case.prompt_tokens - 1, **more)])
        for case, speedup in zip(one.cases, speedups, strict=True)
    ]
    return PdReport(one, describe(0.0), results)


def test_the_headline_is_about_the_longest_prompt() -> None:
    cases = Case(500, 4), Case(2000, 4), Case(2000, 8)
    found = report(plan(VLLM, MLX, *cases), 1.0, 3.0, 5.0).to_json()
    assert found["ttft_speedup_vs_decode_alone"] == 4.0
    assert found["ttft_speedup_vs_prefill_alone"] == pytest.approx(0.9)
    assert found["remote_token_share"] == pytest.approx((499 + 1999 + 1999) / 4500)
    assert [row["prompt_tokens"] for row in found["cases"]] == [500, 2000, 2000]


@pytest.mark.parametrize(
    ("prefill", "decode", "speedup", "bound"),
    [
        (VLLM, MLX, 2.5, True),
        (VLLM, MLX, 2.4, True),
        (MLX, MLX, 1.0, False),
        (MLX, VLLM, 1.0, False),
        (SidePlan("vllm", address="10.0.0.2:52415"), MLX, 1.0, False),
    ],
)
def test_the_bound_is_for_vllm_and_mlx_here(prefill: SidePlan, decode: SidePlan, speedup: float, bound: bool) -> None:
    found = report(plan(prefill, decode), 9.0, speedup).to_json()
    assert found["passed"]["remote_token_share"]
    assert ("ttft_speedup_vs_decode_alone" in found["bounds"]) is bound
    assert found["passed"].get("ttft_speedup_vs_decode_alone") == ((speedup >= 2.5) if bound else None)


def test_short_prompts_are_held_to_no_speedup() -> None:
    assert list(plan(VLLM, MLX, Case(1999, 4)).bounds) == ["remote_token_share"]


def test_a_figure_that_is_not_there_misses_its_bound() -> None:
    one = report(plan(VLLM, MLX), 9.0, 9.0, prefill="local")
    found = one.to_json()
    assert found["ttft_speedup_vs_decode_alone"] is None
    assert found["passed"]["ttft_speedup_vs_decode_alone"] is False
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        show(one, console)
    said = captured.get()
    assert "not compared" in said
    assert "missed" in said
    assert "no speedup of 2000 + 4: disaggregated: the prompt was read local" in said


def test_the_picture_has_a_point_for_each_answer() -> None:
    root = ElementTree.fromstring(svg(report(plan(VLLM, MLX), 9.0, 9.0)))
    assert len(root.findall(".//{*}circle")) == 2 * len(ARRANGEMENTS)
    assert len(root.findall(".//{*}polyline")) == len(ARRANGEMENTS)


def test_each_arrangement_is_first_in_turn() -> None:
    assert [turn(number)[0] for number in range(3)] == list(ARRANGEMENTS)
    assert all(sorted(turn(number)) == sorted(ARRANGEMENTS) for number in range(4))


def test_a_running_prefill_node_reads_for_others_first() -> None:
    """Else its prefix cache could serve the hand-off of a prompt that it was asked itself."""
    orders = [turn(number, reads_first=True) for number in range(3)]
    assert all(order.index("disaggregated") < order.index("prefill_alone") for order in orders)
    assert {order.index("decode_alone") for order in orders} == {0, 1, 2}


def test_simulated_prompts_have_exact_lengths_and_beginnings_of_their_own() -> None:
    prompts = Prompts(None, seed=7)
    first, second = prompts.make("0 500 4", 500), prompts.make("1 500 4", 500)
    assert len(first) == len(second) == 500
    assert first[:32] != second[:32]
    assert prompts.make("0 500 4", 500) == first
    assert Prompts(None, seed=8).make("0 500 4", 500) != first


# ---------------------------------------------------------------------------------------------------------------- plans


def made(folder: Path, text: str, **options: Any) -> PdPlan:
    file = folder / "pd.toml"
    file.write_text(text, encoding="utf-8")
    return make_plan(file, Options(**options))


def test_the_usual_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "vllm_here", lambda: True)
    one = make_plan(None, Options())
    assert (one.prefill, one.decode) == (SidePlan("vllm"), SidePlan("mlx"))
    assert len(one.cases) == 6
    assert (one.longest, one.rounds, one.warm_up) == (2000, 3, 1)
    assert {case.output_tokens for case in one.cases} == {16, 64}
    assert one.seed != make_plan(None, Options()).seed
    monkeypatch.setattr(config, "vllm_here", lambda: False)
    assert make_plan(None, Options(seed=3)).prefill == SidePlan("mlx")


FILE = """
model = "some/model"
rounds = 5
timeout_seconds = 60
[prefill]
engine = "vllm"
dtype = "bfloat16"
threads = 1
environment = {VLLM_LOGGING_LEVEL = "WARNING", TANDEM_CLUSTER_SECRET = "quite a secret"}
[decode]
address = "studio:52415"
model = "some/model-4bit"
[[cases]]
prompt_tokens = [100, 200]
output_tokens = [4, 8]
[[cases]]
prompt_tokens = 100
output_tokens = 4
"""


def test_a_file(tmp_path: Path) -> None:
    one = made(tmp_path, FILE)
    assert (one.rounds, one.timeout_seconds, one.warm_up) == (5, 60, 1)
    assert (one.prefill.engine, one.prefill.dtype, one.prefill.threads) == ("vllm", "bfloat16", 1)
    assert (one.prefill.model, one.decode.model) == ("some/model", "some/model-4bit")
    assert one.decode.address == "studio:52415"
    assert one.cases == (Case(100, 4), Case(100, 8), Case(200, 4), Case(200, 8))
    assert one.told().prefill.environment == {"VLLM_LOGGING_LEVEL": "WARNING", "TANDEM_CLUSTER_SECRET": "(not shown)"}


def test_options_go_before_a_file(tmp_path: Path) -> None:
    one = made(tmp_path, FILE, prompt_tokens=(64,), rounds=1, prefill="mlx", seed=9)
    assert (one.rounds, one.seed, one.prefill.engine) == (1, 9, "mlx")
    assert one.cases == (Case(64, 16), Case(64, 64))


def test_the_peers_names_of_the_same_things(tmp_path: Path) -> None:
    one = made(tmp_path, "pp = [4096, 8192]\ntg = 128\nrepeat = 2\nwarmup = 0\ntimeout = 7200.0")
    assert one.cases == (Case(4096, 128), Case(8192, 128))
    assert (one.rounds, one.warm_up, one.timeout_seconds) == (2, 0, 7200.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompts = [1]", "prompts"),
        ("rounds = 'many'", "rounds"),
        ("rounds = 0", "rounds must be at least 1"),
        ("pp = 3", "at least 16"),
        ("tg = 1", "at least 2"),
        ("[prefill]\nengine = 'llama'", "llama"),
        ("[prefill]\nprofile = {prefill_tps = 5}\nengine = 'mlx'", "profile"),
        ("[prefill]\nengine = 'sim'\nprofile = {speed = 5}\n[decode]\nengine = 'sim'", "unknown keys"),
        ("[prefill]\nengine = 'sim'", "simulated"),
        ("[prefill]\nkv = 'spark:5000'", "address"),
        ("pp = 100\n[[cases]]\npp = 100\ntg = 4", "not both"),
        ("[[cases]]\npp = 100", "output_tokens"),
        ("[prefill", "not TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(tmp_path, text)


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="500,1000"):
        parse_lengths("long", "prompt_tokens")
    with pytest.raises(ConfigError, match="sim:KEY"):
        make_plan(None, Options(prefill="llama"))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_plan(tmp_path / "none.toml", Options())


def test_one_node_is_not_both_sides() -> None:
    side = Side("prefill", HOST, 1, "sim", "default", "one", "")
    with pytest.raises(ConfigError, match="both sides"):
        check_two(side, side)


def test_how_a_side_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = SidePlan("sim", profile={"prefill_tps": 5.0, "script": "a, b"}, threads=2, environment={"A": "b"})
    process = up("prefill", side, tmp_path, alone=True).process
    command, environment = process._command, process._environment
    assert "sim:prefill_tps=5.0,script=a%2C b" in command
    assert command[command.index("--dtype") + 1] == "auto"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["A"] == "b"
    assert (environment["TANDEM_KV_PORT"], environment["TANDEM_PREFIX_CACHE_BYTES"]) == ("0", "0")
    assert environment["TANDEM_CLUSTER_SECRET"] == ""
    other = up("decode", SidePlan("sim"), tmp_path, alone=False).process
    assert other._environment["TANDEM_KV_PORT"] == "-1"
    assert "TANDEM_CLUSTER_SECRET" not in other._environment
    assert "--engine" not in other._command
    assert (tmp_path / "decode-home" / "engines").is_symlink()
    monkeypatch.setattr(sides, "_reference", lambda plan: plan.model)
    reads = up("reads", SidePlan("vllm", model="/some/model"), tmp_path, alone=True).process._command
    assert reads[reads.index("--engine") + 1] == "vllm"
    assert "/some/model" in reads
