"""`lm-eval`'s `local-completions` scores a task over HTTP as mlx-lm's own harness scores it in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config import Settings
from tandem.engines.mlx import blas
from tandem.models.store import ModelStore

from .server import Server

pytestmark = [pytest.mark.clients, pytest.mark.real_model, pytest.mark.timeout(900)]

TASK = Path(__file__).parent / "lm_eval_task" / "facts.yaml"

Scores = list[list[tuple[float, bool]]]
"""Of each item and each of its choices: the log-likelihood, and whether greedy decoding would have said it."""


class Outcome:
    """What one run of the task came to."""

    def __init__(self, results: dict[str, Any]) -> None:
        [(name, self.metrics)] = results["results"].items()
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        # lm-eval keeps responses as text in its samples of some versions, as pairs in others.
        self.scores: Scores = [
            [(float(score), str(greedy) == "True") for [(score, greedy)] in sample["resps"]] for sample in samples
        ]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The task, its data found from wherever the tests run."""
    config: dict[str, Any] = yaml.safe_load(TASK.read_text())
    config["dataset_kwargs"] = {
        "data_files": {
            split: str(TASK.with_name(name)) for split, name in config["dataset_kwargs"]["data_files"].items()
        },
        "cache_dir": str(tmp_path_factory.mktemp("datasets")),
    }
    return config


def evaluate(model: Any, task: dict[str, Any], **options: Any) -> Outcome:
    import lm_eval.models  # noqa: F401  (it registers its own models only while nobody else has registered one)
    from lm_eval import simple_evaluate

    return Outcome(simple_evaluate(model=model, tasks=[dict(task)], bootstrap_iters=0, **options))


@pytest.fixture(scope="module")
def folder(real_home: Path, real_server: Server) -> Path:
    """The model that the server serves: its tokenizer for lm-eval, its weights for mlx-lm."""
    return ModelStore(Settings(home=real_home)).locate("demo").path


@pytest.fixture(scope="module")
def reference(folder: Path, task: dict[str, Any]) -> Outcome:
    """mlx-lm's own harness."""
    blas.load()
    from mlx_lm.evaluate import MLXLM

    return evaluate(MLXLM(str(folder)), task)


def over_http(server: Server, folder: Path) -> dict[str, Any]:
    """What `lm-eval` needs to know of a server."""
    address = f"{server.v1}/completions"
    return {"model": "demo", "base_url": address, "tokenizer": str(folder), "tokenizer_backend": "huggingface"}


def check_equal(outcome: Outcome, reference: Outcome) -> None:
    assert len(outcome.scores) > 0
    for item, (ours, theirs) in enumerate(zip(outcome.scores, reference.scores, strict=False)):
        assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-3), item
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs], item


def test_the_score_is_mlx_lms(real_server: Server, folder: Path, task: dict[str, Any], reference: Outcome) -> None:
    arguments = over_http(real_server, folder) | {"tokenized_requests": True}
    outcome = evaluate("local-completions", task, model_args=arguments, batch_size=8)
    assert len(outcome.scores) == 12
    check_equal(outcome, reference)
    for metric in ("acc,none", "acc_norm,none"):
        assert outcome.metrics[metric] == reference.metrics[metric]
    assert 0.25 < outcome.metrics["acc,none"] < 1, "a task that says nothing would compare nothing"


def test_text_requests_many_at_once(
    real_server: Server, folder: Path, task: dict[str, Any], reference: Outcome
) -> None:
    arguments = over_http(real_server, folder) | {"tokenized_requests": False, "num_concurrent": 6}
    outcome = evaluate("local-completions", task, model_args=arguments, limit=4)
    assert len(outcome.scores) == 4
    check_equal(outcome, reference)
