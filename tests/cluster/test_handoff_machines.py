"""A hand-off between two machines over a cable of 1 Gbit/s: two `tandem up`, one secret, the real model."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.bench.prompts import PromptMaker
from tandem.models.packaged import INSTALL_HINT, MODEL_ID, packaged_gguf
from tests.cluster.netns import Network
from tests.cluster.up_nodes import UpNode, UpNodes, each, meet

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(packaged_gguf() is None, reason=INSTALL_HINT),
]

MEGABITS = 1000.0
CABLE = MEGABITS * 1e6 / 8
PROMPT_TOKENS = int(os.environ.get("TANDEM_HANDOFF_TOKENS", "600"))
"""It is read twice, which is most of the time that this file takes."""
DEADLINE = 240.0
"""Of a machine that does much else, too; the whole file takes less than a minute on two idle cores."""


@dataclass(frozen=True)
class Pair:
    """Two nodes with an instance of the model each, not linked yet, and the KV port of the first."""

    prefill: UpNode
    decode: UpNode
    prefill_instance: str
    decode_instance: str
    kv_port: int

    @property
    def peer(self) -> str:
        return f"{self.prefill.machine.address}:{self.kv_port}"


@pytest.fixture(scope="module")
def pair(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = {
        "TANDEM_OFFLINE": "true",
        "TANDEM_AUTOMATIC_LINKS": "false",
        # The proof's prompts are some chunks long.
        "TANDEM_PREFILL_CHUNK": "64",
        # All sides share the cores: more threads than those wait for one another.
        "OPENBLAS_NUM_THREADS": "1",
    }
    with Network() as network, UpNodes(tmp_path_factory.mktemp("machines")) as up:
        prefill, decode = nodes = [up.node(network.machine(name), **settings) for name in ("prefill", "decode")]
        for node in nodes:
            node.machine.rate(MEGABITS)
            node.start()
        for node in nodes:
            node.ready()
        meet(nodes)
        decode.ask("wait_engine", backend="MlxCpu", deadline=DEADLINE, within=DEADLINE)
        # One node is asked for both.
        there, here = [place(decode, node) for node in nodes]
        for instance, _ in (there, here):
            each(nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
        status, state = decode.request("GET", "/state").whole()
        assert status == 200, state
        yield Pair(prefill, decode, there[0], here[0], state["prefillServerPorts"][there[1]])


def place(by: UpNode, on: UpNode) -> tuple[str, str]:
    """Ids of an instance, and of its runner."""
    body = {"model_id": "demo", "node_ids": [on.id]}
    status, reply = by.request("POST", "/place_instance", body).whole()
    assert status == 200, reply
    [instance] = reply["instance"].values()
    return instance["instanceId"], instance["shardAssignments"]["nodeToRunner"][on.id]


def answer(pair: Pair, prompt: str) -> tuple[str, dict[str, Any]]:
    """Text and statistics of a greedy answer that no prefix cache helped with, asked of the decode node."""
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0.0,
    }
    status, reply = pair.decode.request("POST", "/bench/chat/completions", body, DEADLINE).whole()
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"], reply["generation_stats"]


def test_the_proof_passes(pair: Pair) -> None:
    """`tandem verify` beside the decode node, against the running prefill node."""
    sent = pair.prefill.machine.sent()
    arguments = ("verify", "demo", "--peer", pair.peer, "--quick", "--tokens", "4", "--json")
    ran = pair.decode.command(*arguments, deadline=DEADLINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr + pair.prefill.story()
    report = json.loads(ran.stdout)
    assert report["passed"]
    assert report["peer"] == pair.peer
    assert len(report["cases"]) == 9
    assert any(case["exact"] for case in report["cases"])
    moved = sum(case["handoff"]["bytes"] for case in report["cases"])
    print(f"\nverified over the cable: {len(report['cases'])} cases, {moved / 1e6:.0f} MB of entries")
    assert moved > 10e6
    assert pair.prefill.machine.sent() - sent > moved


def test_a_long_prompt_is_read_on_the_other_machine(pair: Pair) -> None:
    [tokenizer] = (pair.decode.home / "converted").glob("*/tokenizer.json")
    prompt = PromptMaker(tokenizer.parent).make("over a cable", PROMPT_TOKENS)
    expected, alone = answer(pair, prompt)
    assert alone["handoff"]["prefill"] == "local"
    link = {"prefill_instances": [pair.prefill_instance], "decode_instances": [pair.decode_instance]}
    status, reply = pair.decode.request("POST", "/v1/instance-links", link).whole()
    assert status == 200, reply
    pair.decode.ask("wait_peers", instance_id=pair.decode_instance, deadline=DEADLINE)
    sent = pair.prefill.machine.sent()
    # The peer is tried once, whatever it may be worth: no need to force anything.
    text, statistics = answer(pair, prompt)
    handoff = statistics["handoff"]
    print(f"\n{statistics['prompt_tokens']} tokens: {alone['ttft_seconds']:.2f} s alone, handed off {handoff}")
    assert text == expected
    assert (handoff["prefill"], handoff["peer"], handoff["codec"]) == ("remote", pair.prefill.id, "raw")
    assert handoff["remote_tokens"] == statistics["prompt_tokens"] - 1 > PROMPT_TOKENS * 0.95
    assert pair.prefill.machine.sent() - sent > handoff["bytes"]
    # Nothing came sooner than the cable carries it.
    assert statistics["ttft_seconds"] > handoff["bytes"] / CABLE


def test_the_port_is_closed_to_strangers(pair: Pair) -> None:
    """It speaks TLS 1.3 only, and not with those who have no certificate of the cluster."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(pair.prefill.machine.connect(pair.kv_port)) as stranger:
        assert stranger.version() == "TLSv1.3"
        with pytest.raises(ssl.SSLError, match="certificate required"):
            stranger.recv(1)


def test_the_cable_is_as_fast_as_it_says(pair: Pair) -> None:
    """Measured by the decode node itself, as both run the same model."""
    pair.decode.ask("wait_links", count=1, deadline=DEADLINE, within=DEADLINE)
    [rate] = [link["bandwidth"] for link in pair.decode.ask("links") if link["node_id"] == pair.prefill.id]
    print(f"\nmeasured: {rate / 1e6:.0f} of {CABLE / 1e6:.0f} MB/s")
    # A busy machine does not fill it, and none gets more through.
    assert 0 < rate < CABLE * 1.1
