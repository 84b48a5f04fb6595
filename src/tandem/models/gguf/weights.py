"""Dequantise a GGUF file's tensors and write them as safetensors, one tensor at a time.

Stored types: F32, F16 and BF16 tensors keep their type. Quantised ones become float32 in small models and float16 in
large ones. Only float32 holds every product of a scale and a quantised value: float16 moves the logits of a 270M model
by 0.005, which is enough to turn a near tie between two tokens the other way than another reader of the same file.
Large models pay for exactness with twice the disk, and float16's 11 bits are still far finer than a quantisation step;
bfloat16 would keep 8 and move Q4_1 weights by up to a fifteenth of a step.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.gguf.reader import GgufFile, TensorInfo

READABLE = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    # K-quant files use these for rows that do not fill a block of 256.
    "Q5_0", "Q5_1", "IQ4_NL",
)  # fmt: skip
STORED: dict[str, tuple[str, int]] = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
"""Our name and bytes per element of the types that are kept; everything else is stored as F16."""
EXACT_UP_TO = 1_000_000_000
"""Parameters of the largest model whose quantised tensors are stored as float32."""
ROWS_AT_A_TIME = 4 << 20
"""Elements dequantised together: bounds the working memory, whatever the tensor's size."""
FLOAT16_MAX = 65504.0

Transform: TypeAlias = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


@dataclass(frozen=True)
class Target:
    """One tensor to write.

    Attributes:
        name: in the checkpoint, e.g. `model.norm.weight`.
        source: the tensor in the GGUF file.
        reorder: moves the elements of the whole array about; None leaves them where they are.
        offset: added to every element; a tensor with one is stored as float32.
        exact: store quantised values as float32 rather than float16.
    """

    name: str
    source: TensorInfo
    reorder: Transform | None = None
    offset: float = 0.0
    exact: bool = False

    @property
    def stored(self) -> tuple[str, int]:
        """The safetensors type it is written as, and its bytes per element."""
        if self.offset:
            return "F32", 4
        return STORED.get(self.source.quantization, ("F32", 4) if self.exact else ("F16", 2))

    @property
    def stored_size(self) -> int:
        """Bytes it takes in the safetensors file."""
        return math.prod(self.source.shape) * self.stored[1]


def check_readable(file: GgufFile) -> None:
    """Raises:
    UnsupportedModelError: a tensor's quantisation is not one that we read.
    """
    found = sorted({tensor.quantization for tensor in file.tensors.values()} - set(READABLE))
    if found:
        raise UnsupportedModelError(
            f"{file.path.name} holds tensors quantised as {', '.join(found)}, which cannot be read. "
            f"Use a file quantised as one of {', '.join(READABLE)}."
        )


def write_safetensors(path: Path, file: GgufFile, targets: list[Target], written: Callable[[int], None]) -> int:
    """Write `targets` to `path` and return the number of parameters.

    The safetensors library wants all tensors in memory at once; the format (an 8-byte length, a JSON header, the raw
    tensors) lets us write them as they come.

    Args:
        written: called with the number of tensors written so far, after each.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        size = target.stored_size
        header[target.name] = {
            "dtype": target.stored[0],
            "shape": list(target.source.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    parameters = 0
    with path.open("wb") as output:
        output.write(struct.pack("<Q", len(encoded)) + encoded)
        for count, target in enumerate(targets, start=1):
            for part in convert_tensor(file, target):
                output.write(np.ascontiguousarray(part).data)
            parameters += math.prod(target.source.shape)
            written(count)
    return parameters


def convert_tensor(file: GgufFile, target: Target) -> Iterator[npt.NDArray[Any]]:
    """The tensor in its stored type, in row order; whole if it is reordered, else in parts of bounded size."""
    info = target.source
    parts = dequantize(file, info)
    if target.reorder is not None:
        parts = iter([target.reorder(np.concatenate(list(parts)).reshape(info.shape))])
    for part in parts:
        if target.offset:
            yield widen(part, info) + np.float32(target.offset)
        elif info.quantization in STORED:
            yield part
        else:
            check_finite(part, info)
            yield part if target.exact else narrow(part, info)


def dequantize(file: GgufFile, info: TensorInfo) -> Iterator[npt.NDArray[Any]]:
    """Blocks of whole rows [rows, last dimension]: float32, or uint16 bit patterns for F16 and BF16 as they stand."""
    import gguf

    width = info.shape[-1] if info.shape else 1
    rows = math.prod(info.shape) // width
    raw = file.raw(info).reshape(rows, -1)
    step = max(1, ROWS_AT_A_TIME // width)
    kind = gguf.GGMLQuantizationType[info.quantization]
    for first in range(0, rows, step):
        block = raw[first : first + step]
        if info.quantization == "F32":
            yield block.view("<f4")
        elif info.quantization == "F16":
            yield block.view("<f2")
        elif info.quantization == "BF16":
            yield block.view("<u2")
        else:
            with np.errstate(invalid="ignore", over="ignore"):  # `check_finite` sees to those
                yield gguf.quants.dequantize(block, kind)


def widen(values: npt.NDArray[Any], info: TensorInfo) -> npt.NDArray[np.float32]:
    """As float32."""
    if info.quantization == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def check_finite(values: npt.NDArray[Any], info: TensorInfo) -> None:
    """Raises:
    CorruptModelError: a value is infinite or not a number.
    """
    if not np.isfinite(values).all():
        raise CorruptModelError(f"Tensor {info.name!r} holds infinities or NaN. Fetch the file again.")


def narrow(values: npt.NDArray[Any], info: TensorInfo) -> npt.NDArray[np.float16]:
    """Round dequantised values to float16.

    Raises:
        UnsupportedModelError: a value is too large for float16.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest > FLOAT16_MAX:
        raise UnsupportedModelError(f"Tensor {info.name!r} holds {largest:g}, more than float16 can. Use a BF16 file.")
    return values.astype(np.float16)
