"""One machine: identity, the lock on its folder, and the way from a model name to an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.cluster.identity import HomeLock, node_id
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.engines.sim.profile import parse_sim_reference
from tandem.errors import ConfigError, CorruptModelError, InstanceNotReadyError, NotFoundError, UnavailableError
from tandem.types import Finished, GenerationRequest, TextPrompt

pytestmark = pytest.mark.anyio
DEADLINE = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(Settings(home=tmp_path))
    await node.start()
    yield node
    await node.stop()
    assert len(node.local) == 0


async def answer(node: Node, model: str) -> Finished:
    async with asyncio.timeout(DEADLINE):
        async for events in node.generate(model, GenerationRequest(TextPrompt("hello"), max_tokens=3)):
            last = events[-1]
    assert isinstance(last, Finished)
    return last


async def test_models_by_name_any_case_and_default(node: Node) -> None:
    instance = await node.launch("sim:model_id=Tiny")
    await node.wait_ready(instance, DEADLINE)
    for name in ("Tiny", "tiny", "default"):
        assert (await answer(node, name)).usage.completion_tokens == 3
    with pytest.raises(NotFoundError, match="serves Tiny"):
        node.generate("other", GenerationRequest(TextPrompt("x")))


async def test_default_needs_a_single_model(node: Node) -> None:
    for name in ("one", "two"):
        await node.wait_ready(await node.launch(f"sim:model_id={name}"), DEADLINE)
    await answer(node, "two")
    with pytest.raises(NotFoundError, match="one, two"):
        node.generate("default", GenerationRequest(TextPrompt("x")))


async def test_no_model_at_all(node: Node) -> None:
    with pytest.raises(NotFoundError, match="no model at all"):
        node.generate("default", GenerationRequest(TextPrompt("x")))


async def test_a_model_that_is_being_fetched_is_not_unknown(node: Node) -> None:
    with node.models.expecting(["demo"]):
        for name in ("demo", "SmolLM2-135M-Instruct", "default"):
            with pytest.raises(InstanceNotReadyError, match="demo is being fetched") as caught:
                node.generate(name, GenerationRequest(TextPrompt("x")))
            assert caught.value.retry_after
        with pytest.raises(NotFoundError):
            node.generate("other", GenerationRequest(TextPrompt("x")))
    with pytest.raises(NotFoundError):
        node.generate("demo", GenerationRequest(TextPrompt("x")))


async def test_requests_go_to_the_less_busy_instance(node: Node) -> None:
    first, second = [await node.launch("sim:decode_tps=20,answer_tokens=10000") for _ in range(2)]
    await node.wait_ready(first, DEADLINE)
    await node.wait_ready(second, DEADLINE)
    streams = [node.generate("sim", GenerationRequest(TextPrompt("x"))) for _ in range(6)]
    assert sorted(status.running for status in node.instances()) == [3, 3]
    for stream in streams:
        await stream.aclose()


async def test_an_instance_that_dies_leaves_its_work_to_the_other(node: Node) -> None:
    first, second = [await node.launch("sim") for _ in range(2)]
    await node.wait_ready(first, DEADLINE)
    await node.wait_ready(second, DEADLINE)
    victim = next(status for status in node.instances() if status.instance_id == first)
    assert victim.pid is not None
    changed = asyncio.Event()
    node.local.on_change(changed.set)
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.wait_for(changed.wait(), DEADLINE)
    assert any(status.state != "ready" for status in node.instances())
    await answer(node, "sim")


async def test_waiting_for_a_failed_instance_says_why(node: Node) -> None:
    instance = await node.launch("sim:fail_at_load=true")
    with pytest.raises(CorruptModelError, match="told to fail"):
        await node.wait_ready(instance, DEADLINE)
    with pytest.raises(UnavailableError, match="told to fail"):
        node.generate("sim", GenerationRequest(TextPrompt("x")))


async def test_removed_instances_are_gone(node: Node) -> None:
    instance = await node.launch("sim")
    await node.commands.remove(instance)
    with pytest.raises(NotFoundError):
        await node.commands.remove(instance)
    with pytest.raises(NotFoundError):
        await node.wait_ready(instance, DEADLINE)


def test_sim_references() -> None:
    profile = parse_sim_reference("sim:prefill_tps=5e3,answer_tokens=7,script=a%2Cb,fail_at_load=true")
    assert (profile.prefill_tps, profile.answer_tokens, profile.script, profile.fail_at_load) == (5000, 7, "a,b", True)
    with pytest.raises(ConfigError, match="unknown keys \\['speed'\\]"):
        parse_sim_reference("sim:speed=1")
    with pytest.raises(ConfigError, match="answer_tokens"):
        parse_sim_reference("sim:answer_tokens=many")


def test_node_id_lasts(tmp_path: Path) -> None:
    first = node_id(tmp_path / "home")
    assert len(first) == 32
    assert node_id(tmp_path / "home") == first
    assert node_id(tmp_path / "other") != first


def test_unwritable_home_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="TANDEM_HOME"):
        node_id(tmp_path / "file")


def test_one_process_per_home(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    with pytest.raises(ConfigError, match=str(os.getpid())):
        HomeLock(tmp_path)
    lock.release()
    HomeLock(tmp_path).release()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from tandem.cluster.identity import HomeLock\n"
        "lock = HomeLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ConfigError):
        HomeLock(tmp_path)
    child.kill()
    child.communicate()
    HomeLock(tmp_path).release()
