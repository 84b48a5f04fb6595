"""Small layouts of every kind that a cache can have."""

from __future__ import annotations

from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layer, Layout, Part, StateArray

ATTENTION = Layer("tokens", (Part("keys", 3, 16, "float32"), Part("values", 3, 16, "float32")))
MIXED_DTYPES = Layer("tokens", (Part("keys", 2, 32, "bfloat16"), Part("values", 2, 16, "float16")))
LATENT = Layer("tokens", (Part("keys", 1, 64, "bfloat16"), Part("values", 1, 16, "bfloat16")))
QUANTISED = Layer(
    "tokens",
    (
        Part("keys.packed", 2, 8, "uint32"),
        Part("keys.scales", 2, 1, "float16"),
        Part("keys.biases", 2, 1, "float16"),
        Part("values.packed", 2, 8, "uint32"),
        Part("values.scales", 2, 1, "float16"),
        Part("values.biases", 2, 1, "float16"),
    ),
    group_size=64,
    bits=4,
)
WINDOW = Layer("window", (Part("keys", 2, 16, "float32"), Part("values", 2, 16, "float32")), window=40)
SINKS = Layer("window", (Part("keys", 2, 16, "bfloat16"), Part("values", 2, 16, "bfloat16")), window=24, sinks=4)
RECURRENT = Layer(
    "state", states=(StateArray("convolution", (1, 3, 8), "float32"), StateArray("ssm", (1, 4, 8), "float32"))
)
PACKED_STATE = Layer("state", states=(StateArray("counts", (2, 2), "int32"),))

LAYOUTS: dict[str, Layout] = {
    "attention": Layout((ATTENTION, ATTENTION)),
    "mixed dtypes": Layout((ATTENTION, MIXED_DTYPES)),
    "latent": Layout((LATENT, LATENT)),
    "quantised": Layout((QUANTISED, QUANTISED)),
    "window": Layout((WINDOW, ATTENTION, WINDOW)),
    "all windows": Layout((WINDOW, WINDOW)),
    "sinks": Layout((SINKS, ATTENTION)),
    "hybrid": Layout((RECURRENT, ATTENTION, RECURRENT)),
    "all states": Layout((RECURRENT, PACKED_STATE)),
    "composite": Layout((ATTENTION, RECURRENT, WINDOW, SINKS, LATENT, QUANTISED)),
}


def fingerprint(layout: Layout, *, weights: str = "w", quantisation: str = "none", rope: str = "{}") -> Fingerprint:
    """A fingerprint of a made-up model with this layout."""
    return Fingerprint.of(
        layout, architecture="synthetic", tokenizer="t", rope=rope, quantisation=quantisation, weights=weights
    )
