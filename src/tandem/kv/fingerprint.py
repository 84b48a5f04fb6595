"""What two machines must agree on before entries of one may enter a cache of the other."""

from __future__ import annotations

import hashlib
from typing import Annotated, NamedTuple

import msgspec

from tandem.kv.conversion import any_float, convertible, dtypes_of, runs
from tandem.kv.layout import Layout

PROTOCOL_VERSION = 1
MAY_DIFFER = ("dtype", "quantisation", "weights")
"""Fields that are compared after the preamble's digest."""

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Short = Annotated[str, msgspec.Meta(max_length=256)]


class Difference(NamedTuple):
    """One field that two fingerprints disagree on."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: {self.ours} here, {self.theirs} there"


class Fingerprint(msgspec.Struct, frozen=True):
    """The identity of a model's cache. A shard carries that of the whole model.

    Attributes:
        protocol: version of the wire.
        architecture: model type, e.g. `llama`.
        tokenizer: hash of the tokenizer's vocabulary and rules.
        layers: number of leaf caches.
        heads, dims, window, dtype: per part or layer, runs of equal values written once (`5x32` is 32 times 5).
        rope: all parameters that rotate positions, as canonical text; empty without rotary positions.
        layout: digest of the whole layout with one name for all float types, for whatever the fields above do not say.
        quantisation: of the weights, e.g. `none` or `4-bit, groups of 64`.
        weights: digest of the weights.
    """

    protocol: int
    architecture: _Short
    tokenizer: _Short
    layers: int
    heads: _Text
    dims: _Text
    window: _Text
    dtype: _Text
    rope: _Text
    layout: _Short
    quantisation: _Short
    weights: _Short

    @classmethod
    def of(
        cls, layout: Layout, *, architecture: str, tokenizer: str, rope: str, quantisation: str, weights: str
    ) -> Fingerprint:
        """The fingerprint of a model with this layout; the other arguments are the fields of the same name."""
        parts = [part for layer in layout.layers for part in layer.parts]
        states = [state for layer in layout.layers for state in layer.states]
        return cls(
            protocol=PROTOCOL_VERSION,
            architecture=architecture,
            tokenizer=tokenizer,
            layers=len(layout.layers),
            heads=runs([str(part.heads) for part in parts]),
            dims=runs([*(str(part.dim) for part in parts), *("*".join(map(str, state.shape)) for state in states)]),
            window=runs([str(layer.window) for layer in layout.layers]),
            dtype=runs(dtypes_of(layout)),
            rope=rope,
            layout=any_float(layout).digest(),
            quantisation=quantisation,
            weights=weights,
        )

    def differences(self, other: Fingerprint, *, allow_quantisation: bool = False) -> list[Difference]:
        """The fields that differ, with both values; empty if entries may move.

        Float types may always differ: entries are converted on the way.

        Args:
            allow_quantisation: the weights may be the same model's in another quantisation. Weights in the *same*
                quantisation with another digest are another model, and still differ.
        """
        found = [
            Difference(field, str(getattr(self, field)), str(getattr(other, field)))
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
            and not (field == "dtype" and convertible(self.dtype, other.dtype))
        ]
        if allow_quantisation and self.quantisation != other.quantisation:
            return [one for one in found if one.field not in ("quantisation", "weights")]
        return found

    def digest(self) -> bytes:
        """32 bytes over every field but those that may differ: the element types, and, where a link allows it, the
        weights."""
        fields = [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in MAY_DIFFER]
        canonical = msgspec.json.encode(fields)
        return hashlib.sha256(canonical).digest()

    def same_weights(self, other: Fingerprint) -> bool:
        """Whether entries of the two were computed by the same weights, if maybe in other precision."""
        return (self.quantisation, self.weights) == (other.quantisation, other.weights)
