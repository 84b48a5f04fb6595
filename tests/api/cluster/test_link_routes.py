"""Links over HTTP: answered with the link, or with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.helpers import error_of
from tandem.types import Finished, GenerationRequest, HandoffStatistics, TokenPrompt

from .nodes import Served, pair

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pair_of_instances(left: Served, right: Served) -> tuple[str, str]:
    made = []
    for served in (left, right):
        placed = await left.place(model_id="sim:model_id=linked", node_ids=[served.node.node_id])
        made.append(placed["instance_id"])
    for instance_id in made:
        await left.ready(instance_id)
    return made[0], made[1]


async def test_a_link_that_allows_another_quantisation_is_used(tmp_path: Path) -> None:
    """As far as the KV handshake, on both nodes' runners; and not a moment longer than the link says so."""
    async with pair(tmp_path, kv_port=0, automatic_links=False) as (left, right):
        made = []
        for served, quantisation in ((left, "8bit"), (right, "4bit")):
            model = f"sim:model_id=mixed,quantisation={quantisation}"
            placed = await left.place(model_id=model, node_ids=[served.node.node_id])
            made.append(placed["instance_id"])
        for instance_id in made:
            await right.ready(instance_id)
        body = {"prefill_instances": made[:1], "decode_instances": made[1:]}
        refused = await left.http.post("/v1/instance-links", json=body)
        assert "allow_quantisation" in error_of(refused)["message"]
        allowed = await left.http.put("/v1/instance-links/l", json=body | {"allow_quantisation": True})
        assert allowed.status_code == 200, allowed.text
        await right.until(lambda: bool(right.node.prefill_peers(made[1])))
        listed = (await right.http.get(f"/instance/{made[1]}/prefill_peers")).json()["prefill_peers"]
        assert [peer.startswith("127.0.0.1:") for peer in listed] == [True]
        assert (await handoff(right)).prefill == "remote"
        # The same address without the link's permission.
        await left.http.delete("/v1/instance-links/l")
        await right.http.put(f"/instance/{made[1]}/prefill_peers", json={"prefill_peers": listed})
        strict = await handoff(right)
        assert (strict.prefill, "quantisation: 4bit here, 8bit there" in strict.reason) == ("local", True)


async def handoff(served: Served) -> HandoffStatistics:
    """Of a prompt that is long enough for a trial, answered by the node's own instance."""
    [own] = [one.instance_id for one in served.node.local.instances()]
    request = GenerationRequest(TokenPrompt(tuple(range(256)) * 2), max_tokens=2)
    events = [event async for events in served.node.local.submit(own, request) for event in events]
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1].statistics.handoff


async def links(left: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await left.http.get("/v1/instance-links")).json()
    return [link for link in found if not link["automatic"]]


async def test_a_link_and_its_life(left: Served, right: Served, pair_of_instances: tuple[str, str]) -> None:
    one, other = pair_of_instances
    body = {"prefill_instances": [one, one], "decode_instances": [other]}
    made = (await left.http.post("/v1/instance-links", json=body)).json()
    assert made["message"] == "Command received."
    assert made["command_id"] == made["commandId"]
    assert made["linkId"] == made["link_id"]
    assert (made["prefillInstances"], made["decodeInstances"]) == ([one], [other])
    [link] = await links(left)
    assert link["linkId"] == made["linkId"]
    await right.until(lambda: made["linkId"] in right.node.state.links)
    assert await links(right) == await links(left)
    turned = {"prefillInstances": [other], "decodeInstances": [one], "allowQuantisation": True}
    replaced = await left.http.put(f"/v1/instance-links/{made['linkId']}", json=turned)
    assert replaced.json()["allowQuantisation"] is True
    [link] = await links(left)
    assert link["prefillInstances"] == [other]
    fresh = await left.http.put("/v1/instance-links/of-my-choosing", json=body)
    assert fresh.json()["linkId"] == "of-my-choosing"
    assert [link["linkId"] for link in await links(left)] == [made["linkId"], "of-my-choosing"], "newest last"
    for link_id in (made["linkId"], "of-my-choosing"):
        removed = await left.http.delete(f"/v1/instance-links/{link_id}")
        assert removed.json()["linkId"] == link_id
        assert (await left.http.delete(f"/v1/instance-links/{link_id}")).status_code == 404
    assert await links(left) == []


async def test_links_that_cannot_be(left: Served, pair_of_instances: tuple[str, str]) -> None:
    one, other = pair_of_instances
    for prefill, decode, status, words in (
        ([], [other], 400, "no prefill instance"),
        ([one], [], 400, "no decode instance"),
        ([one], [one], 400, "both sides"),
        (["nobody"], [other], 404, "nobody"),
        ("one", [other], 400, "prefill_instances"),
    ):
        body = {"prefill_instances": prefill, "decode_instances": decode}
        answer = await left.http.post("/v1/instance-links", json=body)
        assert (answer.status_code, words in error_of(answer)["message"]) == (status, True), answer.text
    strange = await left.http.put(
        "/v1/instance-links/%20", json={"prefill_instances": [one], "decode_instances": [other]}
    )
    assert strange.status_code == 400
    assert await links(left) == []


async def test_an_instance_takes_its_links_along(left: Served, pair_of_instances: tuple[str, str]) -> None:
    one, other = pair_of_instances
    await left.http.put("/v1/instance-links/short", json={"prefill_instances": [one], "decode_instances": [other]})
    await left.http.delete(f"/instance/{one}")
    assert await links(left) == []
    assert (await left.http.get("/state/instanceLinks")).json() == {}
    assert (await left.http.delete("/v1/instance-links/short")).status_code == 200, "it can still be removed for good"


async def test_unknown_links(left: Served) -> None:
    unknown = await left.http.delete("/v1/instance-links/nothing")
    assert unknown.status_code == 404
    assert "GET /v1/instance-links" in error_of(unknown)["message"]
