"""Our GGUF reader: against the `gguf` package's, and against files that are cut short or damaged."""

from __future__ import annotations

import contextlib
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import CorruptModelError, ModelError, UnsupportedModelError
from tandem.models.gguf.convert import convert_gguf
from tandem.models.gguf.reader import GgufFile

Kind = gguf.GGUFValueType


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a value of every type, and tensors."""

    def change(writer: gguf.GGUFWriter) -> None:
        for kind, value in {
            Kind.UINT8: 200, Kind.INT8: -7, Kind.UINT16: 60_000, Kind.INT16: -30_000, Kind.UINT32: 4_000_000_000,
            Kind.INT32: -2_000_000_000, Kind.FLOAT32: 1.5, Kind.BOOL: True, Kind.STRING: "naïve 你好",
            Kind.UINT64: 2**63 + 1, Kind.INT64: -(2**62), Kind.FLOAT64: 1e300,
        }.items():  # fmt: skip
            writer.add_key_value(f"test.{kind.name.lower()}", value, kind)
        writer.add_key_value("test.numbers", [1, -2, 3], Kind.ARRAY, sub_type=Kind.INT16)
        writer.add_key_value("test.strings", ["", "a", "é"], Kind.ARRAY, sub_type=Kind.STRING)
        writer.add_key_value("test.flags", [True, False], Kind.ARRAY, sub_type=Kind.BOOL)

    folder = tmp_path_factory.mktemp("reader")
    return tiny.write_gguf(
        folder / "m.gguf", "qwen3", tiny.weights("qwen3"), gguf.GGMLQuantizationType.Q8_0, change=change
    )


def test_reads_what_the_gguf_package_reads(small: Path) -> None:
    other = gguf.GGUFReader(small)
    with GgufFile(small) as file:
        theirs = {key: field.contents() for key, field in other.fields.items() if not key.startswith("GGUF.")}
        assert file.metadata == theirs
        assert file.metadata["test.strings"] == ["", "a", "é"]
        assert file.metadata["test.uint64"] == 2**63 + 1
        assert list(file.tensors) == [tensor.name for tensor in other.tensors]
        for tensor in other.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert info.quantization == tensor.tensor_type.name
            assert (info.offset, info.size) == (tensor.data_offset, tensor.n_bytes)
            np.testing.assert_array_equal(file.raw(info), tensor.data.view(np.uint8).ravel())


@pytest.mark.real_model
def test_reads_the_packaged_model_as_the_gguf_package_does(smollm2_gguf: Path) -> None:
    other = gguf.GGUFReader(smollm2_gguf)
    with GgufFile(smollm2_gguf) as file:
        for key, field in other.fields.items():
            if not key.startswith("GGUF.") and field.types[0] != Kind.ARRAY:  # its reader takes seconds over those
                assert file.metadata[key] == field.contents(), key
        assert [(t.name, t.data_offset, t.n_bytes) for t in other.tensors] == [
            (t.name, t.offset, t.size) for t in file.tensors.values()
        ]


def test_a_file_cut_anywhere_is_said_to_be_cut(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    with GgufFile(small) as file:
        end = max(info.offset + info.size for info in file.tensors.values())
    cuts = [1, 3, 4, 7, 8, 16, 23, 24, 30, *range(40, end, max(1, end // 60)), end - 1]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptModelError) as error:
            GgufFile(path)
        assert str(path) in error.value.message


@given(position=st.integers(0, 20_000), value=st.integers(0, 255))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_ends_in_an_error_of_ours_or_is_harmless(
    small: Path, tmp_path: Path, position: int, value: int
) -> None:
    data = bytearray(small.read_bytes())
    data[position % len(data)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with contextlib.suppress(ModelError):
        convert_gguf(path, out)


def header(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        header(struct.pack("<Q", 1 << 62)),
        header(string("key"), struct.pack("<I", 8), struct.pack("<Q", 1 << 62)),
        header(string("key"), struct.pack("<IIQ", 9, 8, 1 << 60)),
        header(string("key"), struct.pack("<IIQ", 9, 0, 1 << 60)),
        header(string("key"), struct.pack("<IIQ", 9, 9, 1 << 60)),
        header(string("key"), struct.pack("<I", 77)),
        header(keys=1 << 60),
        header(keys=0, tensors=1 << 60),
        header(string("t"), struct.pack("<IQQQIQ", 3, 1 << 30, 1 << 30, 1 << 30, 0, 0), keys=0, tensors=1),
        header(string("t"), struct.pack("<I", 1 << 30), keys=0, tensors=1),
        header(struct.pack("<Q", 2), b"\xff\xfe", struct.pack("<IB", 0, 1)),
    ],
    ids=["key", "string", "strings", "bytes", "arrays", "type", "keys", "tensors", "tensor", "dimensions", "utf-8"],
)
def test_lengths_are_bounded_before_memory_is_taken(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CorruptModelError):
        GgufFile(path)


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(string("key"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000))
    with pytest.raises(CorruptModelError):
        GgufFile(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04" + bytes(100)], ids=["empty", "short", "another format"])
def test_another_file_is_not_a_gguf_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CorruptModelError):
        GgufFile(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_are_refused_by_name(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(version=version))
    with pytest.raises(UnsupportedModelError, match=f"version {version}"):
        GgufFile(path)


def test_an_unknown_type_number_is_refused(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(string("t"), struct.pack("<IQIQ", 1, 32, 199, 0), keys=0, tensors=1))
    with pytest.raises(UnsupportedModelError, match="199"):
        GgufFile(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(string("general.name"), struct.pack("<I", 8), string("x")))
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptModelError, match=r"general\.architecture"):
        convert_gguf(path, tmp_path / "out")
