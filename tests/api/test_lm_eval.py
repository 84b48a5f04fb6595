"""lm-eval's `local-completions` over our server gives the scores that mlx-lm gives by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config import Settings
from tandem.engines.mlx import blas

from .served import Served, served

pytestmark = [pytest.mark.clients, pytest.mark.real_model, pytest.mark.slow]

TASK = Path(__file__).parent / "lm_eval_task"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Settings(port=0), "demo") as server:
        yield server


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    text = (TASK / "capitals.yaml").read_text(encoding="utf-8")
    (tmp_path / "capitals.yaml").write_text(text.replace("DATA_FILE", str(TASK / "capitals.jsonl")), encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_scores_equal_mlx_lm(server: Served, tasks: Any) -> None:
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    blas.load()
    from mlx_lm.evaluate import MLXLM

    ours = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="SmolLM2-135M-Instruct",
        tokenizer=str(server.path),
        tokenizer_backend="huggingface",
        batch_size=8,
    )
    theirs = MLXLM(str(server.path), use_chat_template=False)

    def evaluate(model: Any) -> Any:
        return lm_eval.simple_evaluate(
            model, tasks=["tandem_capitals"], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )

    mine, reference = evaluate(ours), evaluate(theirs)
    scores = [sample["filtered_resps"] for sample in mine["samples"]["tandem_capitals"]]
    expected = [sample["filtered_resps"] for sample in reference["samples"]["tandem_capitals"]]
    assert len(scores) == 6
    for sample, other in zip(scores, expected, strict=True):
        for (score, greedy), (wanted, wanted_greedy) in zip(sample, other, strict=True):
            assert score == pytest.approx(wanted, abs=1e-3)
            assert greedy == wanted_greedy
    accuracy = mine["results"]["tandem_capitals"]["acc,none"]
    assert accuracy == reference["results"]["tandem_capitals"]["acc,none"]
    assert accuracy >= 0.5


def test_structured_output(server: Served) -> None:
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        country: str

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "Name the capital of France."}],
        response_format=City,
        max_tokens=60,
        temperature=0,
    )
    assert answer.choices[0].message.parsed is not None
