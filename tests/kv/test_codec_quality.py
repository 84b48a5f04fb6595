"""What codecs do to a real model's answers: SmolLM2 continues a text from a cache that went through one."""

from __future__ import annotations

from tandem.engines.mlx import blas

blas.load()  # before anything imports mlx

from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tandem.config import settings  # noqa: E402
from tandem.engines.base import EngineOptions  # noqa: E402
from tandem.engines.mlx.load import load  # noqa: E402
from tandem.kv.codec import CODECS  # noqa: E402
from tandem.kv.wire import as_bytes  # noqa: E402
from tandem.models.store import ModelStore  # noqa: E402

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CONTEXT, CONTINUED, STRIDE, PASSAGES = 384, 128, 600, 3
TEXT = "architecture.md", "models.md"


class Quality(NamedTuple):
    """Over all continued tokens: perplexity, and how often the likeliest token is the one without a codec."""

    perplexity: float
    agreement: float


def through(codec: str, array: mx.array) -> mx.array:
    """Keys or values `[1, heads, tokens, dim]`, encoded and decoded."""
    entries = np.array(array[0])
    payload = CODECS[codec].encode(entries, "float32")
    assert payload is not None
    out = np.empty_like(entries)
    CODECS[codec].decode(memoryview(b"".join(as_bytes(part) for part in payload)), out, "float32")
    return mx.array(out)[None]


@pytest.fixture(scope="module")
def qualities() -> dict[str, Quality]:
    from mlx_lm.models.cache import make_prompt_cache
    from transformers import AutoTokenizer

    folder = ModelStore(settings()).obtain("demo").path
    model: Any = load(EngineOptions("mlx", "demo", path=str(folder), dtype="float32"), lambda _: None).model
    docs = Path(__file__).parents[2] / "docs"
    ids = AutoTokenizer.from_pretrained(folder)("".join((docs / name).read_text() for name in TEXT)).input_ids
    surprise: dict[str, float] = {}
    agreed: dict[str, int] = {}
    for passage in range(PASSAGES):
        tokens = ids[passage * STRIDE :][: CONTEXT + CONTINUED + 1]
        assert len(tokens) == CONTEXT + CONTINUED + 1
        filled = make_prompt_cache(model)
        model(mx.array(tokens[:CONTEXT])[None], cache=filled)
        entries = [(layer.keys[..., :CONTEXT, :], layer.values[..., :CONTEXT, :]) for layer in filled]
        exact: np.ndarray[Any, Any] | None = None
        for codec in ("raw", *CODECS):
            cache = make_prompt_cache(model)
            for layer, both in zip(cache, entries, strict=True):
                layer.keys, layer.values = both if codec == "raw" else (through(codec, one) for one in both)
                layer.offset = CONTEXT
            logits = model(mx.array(tokens[CONTEXT:-1])[None], cache=cache)[0]
            logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            chosen = logprobs.argmax(axis=-1)
            exact = chosen if exact is None else exact
            taken = logprobs[np.arange(CONTINUED), tokens[CONTEXT + 1 :]]
            surprise[codec] = surprise.get(codec, 0.0) - float(taken.sum())
            agreed[codec] = agreed.get(codec, 0) + int((chosen == exact).sum())
    total = PASSAGES * CONTINUED
    return {name: Quality(float(np.exp(surprise[name] / total)), agreed[name] / total) for name in surprise}


@pytest.mark.parametrize(("codec", "perplexity", "agreement"), [("int8", 0.01, 0.975), ("int4", 0.06, 0.90)])
def test_quality(
    qualities: dict[str, Quality],
    codec: str,
    perplexity: float,
    agreement: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw, found = qualities["raw"], qualities[codec]
    with capsys.disabled():
        print(
            f"\n{codec}: perplexity {found.perplexity:.3f} (raw {raw.perplexity:.3f}), "
            f"greedy agreement {found.agreement:.1%}"
        )
    assert abs(found.perplexity / raw.perplexity - 1) < perplexity
    assert found.agreement >= agreement
