"""Read a GGUF file's metadata and find its tensors.

Format: the GGUF specification, versions 2 and 3, little endian. We parse the header ourselves because the `gguf`
package builds several NumPy objects for every string (seconds and hundreds of megabytes for a vocabulary of 262,144)
and does not bound lengths; its constants and its dequantisation are used, and a test compares both readers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.gguf.metadata import Metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Value type to `struct` code, from the specification's `gguf_metadata_value_type`."""
MAX_DIMENSIONS = 4
MAX_NESTING = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        shape: row major, outermost dimension first (GGUF stores it the other way round).
        quantization: the GGML type's name, e.g. `Q4_1`.
        offset: bytes from the start of the file.
        size: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    quantization: str
    offset: int
    size: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name.

    Args:
        path: the file.

    Raises:
        CorruptModelError: not a GGUF file, or it ends too early.
        UnsupportedModelError: a version, byte order or tensor type that we do not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CorruptModelError(f"{path} cannot be read as a GGUF file: {error}.") from error
        cursor = _Cursor(path, self._data)
        if cursor.take(4) != MAGIC:
            raise CorruptModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            byte_order = " (or a big-endian file)" if version & 0xFFFF == 0 else ""
            raise UnsupportedModelError(f"{path} is GGUF version {version}{byte_order}; versions 2 and 3 are read.")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = Metadata(path)
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors: dict[str, TensorInfo] = self._read_tensors(cursor, tensor_count)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string()
            dimensions = cursor.scalar("I")
            if not 0 < dimensions <= MAX_DIMENSIONS:
                raise CorruptModelError(f"{self.path}: tensor {name!r} claims {dimensions} dimensions.")
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
            if 0 in shape:
                raise CorruptModelError(f"{self.path}: tensor {name!r} is empty.")
            entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.size("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_number, offset in entries:
            try:
                kind = GGMLQuantizationType(type_number)
            except ValueError:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} has quantisation type number {type_number}, which is not known "
                    "here. Use a file quantised as Q4_0, Q4_1, Q8_0, F16, BF16 or a K-quant."
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if shape[-1] % block:
                raise CorruptModelError(f"{self.path}: rows of tensor {name!r} do not fill {kind.name} blocks.")
            size = elements // block * block_bytes
            if start + offset + size > len(self._data):
                raise CorruptModelError(
                    f"{self.path} is cut short: tensor {name!r} ends at byte {start + offset + size:,}, "
                    f"the file at {len(self._data):,}. Fetch it again."
                )
            tensors[name] = TensorInfo(name, shape, kind.name, start + offset, size)
        return tensors

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored: a view into the mapped file."""
        return self._data[info.offset : info.offset + info.size]

    @property
    def architecture(self) -> str:
        """GGUF's name of the architecture, e.g. `llama`."""
        return self.metadata.text("general.architecture")

    def close(self) -> None:
        """Forget the mapping; `raw` views that others still hold stay valid."""
        self._data = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data.data
        self.position = 0
        self.depth = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise CorruptModelError(
                f"{self.path} is cut short: its header runs past the end of the file. Fetch it again."
            )
        taken = bytes(self.data[self.position : end])
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptModelError(f"{self.path}: a string in the header is not UTF-8 ({error}).") from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise CorruptModelError(f"{self.path}: unknown metadata value type {kind}.")
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            item = np.dtype("<" + SCALARS[kind])
            scalars: list[Any] = np.frombuffer(self.take(count * item.itemsize), dtype=item).tolist()
            return scalars
        # A string takes at least its 8-byte length, an array at least 12: a bound before memory is taken.
        if count * 8 > len(self.data) - self.position:
            raise CorruptModelError(f"{self.path}: an array in the header claims {count:,} entries.")
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise CorruptModelError(f"{self.path}: arrays in the header are nested more than {MAX_NESTING} deep.")
        values = [self.value(kind) for _ in range(count)]
        self.depth -= 1
        return values
