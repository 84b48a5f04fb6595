"""`tandem up`: what it announces, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tandem.cluster.bus.config import free_port
from tests.cluster.small_models import write_model

from .conftest import TANDEM, Run, Up, environment

StartUp = Callable[..., Up]


def request(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    return connection.getresponse()


def begin_stream(url: str) -> http.client.HTTPResponse:
    """A stream of which some text has arrived."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    response = request(url, "POST", "/v1/chat/completions", body)
    seen = b""
    while b'"content":" ' not in seen:
        line = response.readline()
        seen += line
        assert line, f"{response.status}: {seen!r}"
    return response


def test_events_lead_to_a_server_that_answers(up: StartUp) -> None:
    server = up("sim:answer_tokens=3")
    url = server.event("listening")["url"]
    ready = server.ready()
    assert ready["url"] == url
    assert [model["id"] for model in ready["models"]] == ["sim"]
    assert ready["models"][0]["engine"] == "sim"
    assert request(url, "GET", "/health").status == 200
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
    answer = json.loads(request(url, "POST", "/v1/chat/completions", body).read())
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_several_models(up: StartUp) -> None:
    ready = up("sim:model_id=one", "sim:model_id=two").ready()
    assert sorted(model["id"] for model in ready["models"]) == ["one", "two"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(up: StartUp, number: signal.Signals) -> None:
    server = up("sim")
    server.ready()
    server.signal(number)
    assert server.event("stopping")["running"] == 0
    server.event("stopped")
    assert server.wait() == 0
    assert server.runners_left() == []
    assert server.errors() == ""


def test_the_end_of_its_standard_input_ends_it_in_order(home: Path) -> None:
    command = [*TANDEM, "up", "sim", "--json", "--port", "0", "--until-eof"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(home), text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("nothing that matters\n")
        process.stdin.flush()
        events = []
        for line in process.stdout:
            events.append(json.loads(line)["event"])
            if events[-1] == "ready":
                process.stdin.close()
        assert process.wait(60) == 0
    assert events[-2:] == ["stopping", "stopped"]


def stop_and_finish(server: Up, stream: http.client.HTTPResponse) -> None:
    """The server is told to stop, and the answer that it computes comes whole."""
    server.signal(signal.SIGTERM)
    assert server.event("stopping")["running"] == 1
    rest = stream.read()
    assert b'"finish_reason":"stop"' in rest or b'"finish_reason":"length"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert server.wait() == 0


def test_running_answers_may_finish(up: StartUp) -> None:
    server = up("sim:decode_tps=50,answer_tokens=60")
    stream = begin_stream(server.ready()["url"])
    stop_and_finish(server, stream)


def test_answers_for_other_nodes_may_finish_too(up: StartUp, tmp_path: Path) -> None:
    port = str(free_port("tcp"))
    server = up("sim:decode_tps=50,answer_tokens=100", TANDEM_CLUSTER_PORT=port)
    server.ready()
    asked = up("--no-models", TANDEM_HOME=str(tmp_path / "asked"), TANDEM_CLUSTER_PEERS=f"127.0.0.1:{port}")
    url = asked.ready()["url"]
    # It may know of the instance before it has met the node: waiting does not end in "gone" then.
    assert b"runners_ready" in request(url, "GET", "/instance/await?model_id=sim").read()
    stream = begin_stream(url)
    stop_and_finish(server, stream)
    assert server.runners_left() == []


def test_answers_that_take_too_long_end_in_an_error_event(up: StartUp) -> None:
    server = up("sim:decode_tps=10,answer_tokens=10000", TANDEM_STOP_DEADLINE="0.3")
    stream = begin_stream(server.ready()["url"])
    server.signal(signal.SIGINT)
    rest = stream.read()
    assert b'data: {"error":' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert server.wait() == 0
    assert server.runners_left() == []


def test_a_second_signal_ends_it_at_once(up: StartUp) -> None:
    server = up("sim:decode_tps=10,answer_tokens=10000")
    stream = begin_stream(server.ready()["url"])
    server.signal(signal.SIGINT)
    assert server.event("stopping")["running"] == 1
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert server.runners_left() == []
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        stream.read()


def test_it_can_be_stopped_while_it_loads(up: StartUp) -> None:
    server = up("sim:load_seconds=600,layers=6000")
    assert server.event("progress")["model"] == "sim"
    children = psutil.Process(server.process.pid).children()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_model_that_cannot_load_says_why(up: StartUp) -> None:
    server = up("sim:fail_at_load=true", TANDEM_MAX_RESTARTS="0")
    assert server.event("error")["message"]
    assert server.wait() == 1
    (line,) = server.errors().splitlines()
    assert line.startswith("Error: ")


def test_an_unknown_model_says_so(up: StartUp) -> None:
    server = up("nothing-of-this-name")
    assert server.event("error")["code"] == "not_found"
    assert server.wait() == 1


def test_a_model_comes_from_a_neighbour_before_the_hub(up: StartUp, home: Path, tmp_path: Path) -> None:
    """That it cannot be computed is found out when it is here."""
    files = write_model(home / "models" / "org--small", 6 << 20)
    port = str(free_port("tcp"))
    up("--no-models", TANDEM_CLUSTER_PORT=port).ready()
    needy = tmp_path / "needy"
    server = up("org/small", TANDEM_HOME=str(needy), TANDEM_CLUSTER_PEERS=f"127.0.0.1:{port}", TANDEM_OFFLINE="true")
    step = server.event("progress")
    assert (step["model"], step["phase"]) == ("org/small", "download")
    assert "offline" not in server.event("error")["message"].lower()
    assert server.wait() == 1
    for name, content in files.items():
        assert (needy / "models" / "org--small" / name).read_bytes() == content


def test_one_server_per_data_folder(up: StartUp, tandem: Run, home: Path) -> None:
    server = up("sim")
    server.ready()
    second = tandem("up", "sim", "--port", "0")
    assert second.returncode == 1
    assert f"process {server.process.pid}" in second.stderr
    assert str(home) in second.stderr
    assert "TANDEM_HOME" in second.stderr


def test_a_killed_server_leaves_no_runner_and_no_lock(up: StartUp) -> None:
    server = up("sim")
    server.ready()
    server.signal(signal.SIGKILL)
    server.wait()
    assert server.runners_left() == []
    up("sim").ready()


def test_a_taken_port_is_named_before_anything_loads(tandem: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = tandem("up", "sim:load_seconds=600", "--port", port)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


def test_other_machines_are_not_served_without_a_key(tandem: Run) -> None:
    done = tandem("up", "sim", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 1
    assert "TANDEM_API_KEY" in done.stderr
    assert "--open" in done.stderr


def test_a_person_gets_an_address_and_something_to_try(home: Path) -> None:
    command = [*TANDEM, "up", "sim", "--port", "0", "--api-key", "key-of-mine"]
    with subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        lines = []
        for line in up.stdout:
            lines.append(line.strip())
            if line.strip().startswith("stop"):
                break
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)
    assert up.returncode == 0
    block = "\n".join(lines)
    address = next(line.split()[1] for line in lines if line.startswith("address"))
    assert address.startswith("http://127.0.0.1:")
    assert f"curl {address}/v1/chat/completions" in block
    assert "$TANDEM_API_KEY" in block
    assert "key-of-mine" not in block
    assert f"chat --port {address.rpartition(':')[2]}" in block
