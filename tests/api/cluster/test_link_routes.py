"""Links over HTTP: answered with the link, or with what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from api.helpers import error_of

from .nodes import Served

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
