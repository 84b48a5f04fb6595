"""`tandem run`: where the answer comes from, and what is printed where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from .conftest import TANDEM, Run, Up, environment

StartUp = Callable[..., Up]
SCRIPTED = "sim:script=All is well."


def port_of(url: str) -> str:
    return str(urlsplit(url).port)


def test_answer_to_standard_output_and_the_rest_to_standard_error(tandem: Run) -> None:
    done = tandem("run", "--model", SCRIPTED, "How", "are", "you?")
    assert done.returncode == 0
    assert done.stdout == "All is well.\n"
    assert "No server is running" in done.stderr
    assert "first token after" in done.stderr


def test_statistics_can_be_left_out(tandem: Run) -> None:
    assert "first token" not in tandem("run", "--model", SCRIPTED, "--no-stats", "hi").stderr


def test_tokens_per_second_are_those_of_the_engine(tandem: Run) -> None:
    done = tandem("run", "--model", "sim:decode_tps=50,answer_tokens=20", "--json", "hi")
    assert json.loads(done.stdout)["statistics"]["generation_tps"] == pytest.approx(50, rel=0.3)


def test_json_is_one_object(tandem: Run) -> None:
    done = tandem("run", "--model", SCRIPTED, "--json", "--max-tokens", "2", "hi")
    answer = json.loads(done.stdout)
    assert answer["model"] == "sim"
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    assert "All is well.".startswith(answer["text"])
    assert answer["text"]


@pytest.mark.parametrize("arguments", [["-"], []])
def test_the_prompt_comes_from_standard_input(tandem: Run, arguments: list[str]) -> None:
    short = tandem("run", "--model", "sim", "--json", *arguments, input="ten letter\n")
    long = tandem("run", "--model", "sim", "--json", *arguments, input="ten letter" * 2 + "\n")
    prompts = [json.loads(done.stdout)["usage"]["prompt_tokens"] for done in (short, long)]
    assert prompts[1] - prompts[0] == len("ten letter")


def test_words_and_standard_input_go_together(tandem: Run) -> None:
    alone = tandem("run", "--model", "sim", "--json", "-", input="text")
    both = tandem("run", "--model", "sim", "--json", "Summarise:", "-", input="text")
    prompts = [json.loads(done.stdout)["usage"]["prompt_tokens"] for done in (alone, both)]
    assert prompts[1] - prompts[0] == len("Summarise:\n\n")


def test_no_question_is_explained(tandem: Run) -> None:
    done = tandem("run", "--model", "sim", input="")
    assert done.returncode == 1
    assert "There is no question" in done.stderr


def test_a_failed_answer_is_one_line(tandem: Run) -> None:
    done = tandem("run", "--model", "sim:die_at_token=3", "hi")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_a_bad_sim_reference_names_the_key(tandem: Run) -> None:
    done = tandem("run", "--model", "sim:speed=3", "hi")
    assert done.returncode == 1
    assert "speed" in done.stderr.splitlines()[-1]


def test_a_running_server_answers(up: StartUp, tandem: Run) -> None:
    url = up(SCRIPTED).ready()["url"]
    for arguments in ([], ["--model", "sim"]):
        done = tandem("run", *arguments, "--host", "127.0.0.1", "--port", port_of(url), "hi")
        assert done.returncode == 0
        assert done.stdout == "All is well.\n"
        assert "No server" not in done.stderr
        assert "loading" not in done.stderr
        assert "first token after" in done.stderr


def test_both_ways_give_the_same_answer(up: StartUp, tandem: Run) -> None:
    port = port_of(up("sim:answer_tokens=12").ready()["url"])
    question = ["--json", "--temperature", "0", "--system", "Be brief.", "hi"]
    remote = json.loads(tandem("run", "--port", port, *question).stdout)
    local = json.loads(tandem("run", "--model", "sim:answer_tokens=12", *question).stdout)
    for field in ("model", "text", "reasoning", "finish_reason", "usage"):
        assert remote[field] == local[field]
    assert remote["statistics"].keys() == local["statistics"].keys()
    assert remote["statistics"]["generation_tokens"] == local["statistics"]["generation_tokens"]


def test_a_model_that_the_server_does_not_serve_is_loaded_here(up: StartUp, tandem: Run) -> None:
    port = port_of(up("sim").ready()["url"])
    done = tandem("run", "--model", SCRIPTED, "--port", port, "hi")
    assert done.stdout == "All is well.\n"
    assert "does not serve" in done.stderr


def test_the_api_key_is_sent_and_a_wrong_one_explained(up: StartUp, tandem: Run) -> None:
    port = port_of(up(SCRIPTED, TANDEM_API_KEY="secret").ready()["url"])
    assert tandem("run", "--port", port, "hi", TANDEM_API_KEY="secret").stdout == "All is well.\n"
    refused = tandem("run", "--port", port, "hi", TANDEM_API_KEY="guess")
    assert refused.returncode == 1
    assert "API key" in refused.stderr


def test_a_server_that_dies_ends_the_answer_in_an_error(up: StartUp, home: Path) -> None:
    server = up("sim:decode_tps=20,answer_tokens=10000")
    port = port_of(server.ready()["url"])
    command = [*TANDEM, "run", "--port", port, "hi"]
    with subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert os.read(asking.stdout.fileno(), 1)
        server.signal(signal.SIGKILL)
        _, errors = asking.communicate(timeout=60)
    assert asking.returncode == 1
    assert errors.decode().splitlines()[-1].startswith("Error: ")


def test_ctrl_c_ends_the_answer_and_the_runner(home: Path) -> None:
    command = [*TANDEM, "run", "--model", "sim:decode_tps=20,answer_tokens=10000", "hi"]
    with subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert os.read(asking.stdout.fileno(), 1)
        runners = psutil.Process(asking.pid).children()
        assert runners
        asking.send_signal(signal.SIGINT)
        _, errors = asking.communicate(timeout=60)
    assert asking.returncode == 130
    assert errors.decode().splitlines()[-1] == "Error: Interrupted."
    assert psutil.wait_procs(runners, timeout=10)[1] == []


def test_a_reader_that_goes_away_is_no_crash(home: Path) -> None:
    command = [*TANDEM, "run", "--model", "sim:decode_tps=200,answer_tokens=500", "hi"]
    with subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert os.read(asking.stdout.fileno(), 1)
        asking.stdout.close()
        assert asking.stderr is not None
        errors = asking.stderr.read().decode()
    assert "Traceback" not in errors


@pytest.mark.real_model
def test_the_packaged_model_is_converted_once_and_answers(tandem: Run) -> None:
    pulled = tandem("models", "pull", "demo", "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["state"] == "ready"
    assert "converting demo" in pulled.stderr
    done = tandem("run", "--temperature", "0", "--max-tokens", "30", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "converting" not in done.stderr
    assert "tokens/s" in done.stderr
