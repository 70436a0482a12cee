"""GGUF headers: whole ones against the gguf package, broken ones in every way that we know."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.model.config_files import config_from_gguf
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import GGUFFile, read_gguf
from headrace.model.init import init_weights
from tests.model.gguf_bytes import ARRAY, BOOL, Q4_0, STRING, UINT8, UINT32, array, field, head, padded, string, u32
from tests.model.gguf_bytes import tensor as entry
from tests.model.tiny import SMALLEST, write_gguf

HUGE = 1 << 63
MEMORY_LIMIT = 16 << 20


def parse(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return read_gguf(path)


def reason(path: Path, data: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        parse(path, data)
    assert caught.value.path == str(path)
    return caught.value.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_every_field_type_is_read_as_the_gguf_package_reads_it(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in [
        ("uint8", 200), ("int8", -100), ("uint16", 60000), ("int16", -30000), ("uint32", 1 << 31),
        ("int32", -(1 << 31)),
        ("float32", 0.1), ("uint64", HUGE), ("int64", -HUGE), ("float64", 0.1), ("bool", True), ("string", "naïve 💧"),
    ]:  # fmt: skip
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    for name, values in [
        ("words", ["a", "", "ö"]),
        ("ints", [1, -2]),
        ("floats", [0.5, 0.1]),
        ("flags", [True, False]),
    ]:
        writer.add_array(f"test.{name}", values)
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, reader = read_gguf(path), gguf.GGUFReader(path)
    expected = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(found.fields) == expected and len(expected) == 17
    for of in reader.tensors:
        tensor = found.tensors[of.name]
        assert (tensor.shape, tensor.offset) == (tuple(int(n) for n in of.shape[::-1]), of.data_offset)
        assert (tensor.num_bytes, tensor.ggml_type) == (of.n_bytes, of.tensor_type)
    assert found.version == 3 and found.data_offset == reader.data_offset and found.file_bytes == path.stat().st_size


def test_version_2_and_another_alignment(path: Path) -> None:
    header = head(version=2, tensors=2, fields=1) + field("general.alignment", UINT32, u32(64))
    header += entry("a", 3) + entry("b", 1, offset=64)
    found = parse(path, padded(header, b"\1" * 68, 64))
    assert found.version == 2 and found.data_offset % 64 == 0
    assert found.tensors["b"].offset == found.data_offset + 64
    assert "outside the file" in reason(path, padded(header, b"\1" * 67, 64))


HOSTILE = {
    "empty file": (b"", "truncated: the magic number needs 4 bytes"),
    "other file": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 1": (head(version=1), "GGUF version 1 is not supported"),
    "version 4": (head(version=4), "GGUF version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file"),
    "huge tensor count": (head(tensors=HUGE) + bytes(99), f"the tensor count is {HUGE}; the limit is"),
    "huge field count": (head(fields=HUGE) + bytes(99), f"the field count is {HUGE}; the limit is"),
    "more tensors than bytes": (head(tensors=100000) + bytes(99), "truncated: the tensor count is 100000"),
    "more fields than bytes": (head(fields=60000) + bytes(99), "truncated: the field count is 60000"),
    "huge key": (head(fields=1) + string("k", claimed=HUGE) + bytes(9), "truncated: the key of field 0 claims"),
    "long key": (head(fields=1) + string("k" * 65536) + bytes(9), "the key of field 0 has 65536 bytes; the limit"),
    "empty key": (head(fields=1) + field("", UINT32, u32(1)), "the key of field 0 is empty"),
    "key not UTF-8": (head(fields=1) + string(b"ab\xff") + bytes(9), "the key of field 0 is not UTF-8 at byte 2"),
    "key twice": (head(fields=2) + field("a", UINT32, u32(1)) * 2, "field 'a' appears twice"),
    "unknown type": (head(fields=1) + field("a", 13, u32(1)), "field 'a' has unknown type 13"),
    "huge string": (head(fields=1) + field("a", STRING, string("b", claimed=HUGE)), "field 'a' claims"),
    "bool of 2": (head(fields=1) + field("a", BOOL, b"\2"), "field 'a' is a boolean with value 2"),
    "huge array": (head(fields=1) + field("a", ARRAY, array(UINT8, HUGE)), f"element count of field 'a' is {HUGE}"),
    "long array": (head(fields=1) + field("a", ARRAY, array(UINT32, 4000000)), "element count of field 'a' is 4000000"),
    "string array": (head(fields=1) + field("a", ARRAY, array(STRING, 4000000)), "which needs 32000000 bytes"),
    "unknown elements": (head(fields=1) + field("a", ARRAY, array(99, 1)), "field 'a' has unknown element type 99"),
    "nested": (head(fields=1) + field("a", ARRAY, array(ARRAY, 1, array(UINT8, 0))), "is an array of arrays"),
    "alignment 0": (head(fields=1) + field("general.alignment", UINT32, u32(0)), "'general.alignment' is 0"),
    "alignment 48": (head(fields=1) + field("general.alignment", UINT32, u32(48)), "'general.alignment' is 48"),
    "alignment text": (head(fields=1) + field("general.alignment", STRING, string("x")), "it must be a power of two"),
    "huge tensor name": (head(tensors=1) + string("a", claimed=HUGE) + bytes(32), "the name of tensor 0 claims"),
    "long tensor name": (head(tensors=1) + entry("a" * 65, 1), "the name of tensor 0 has 65 bytes; the limit is 64"),
    "empty tensor name": (head(tensors=1) + entry("", 1) + bytes(8), "the name of tensor 0 is empty"),
    "no dimensions": (head(tensors=1) + entry("a", num_dims=0) + bytes(9), "tensor 'a' has 0 dimensions"),
    "many dimensions": (head(tensors=1) + entry("a", 1, num_dims=2**32 - 1), "has 4294967295 dimensions"),
    "empty tensor": (head(tensors=1) + entry("a", 0, 4), "tensor 'a' of shape [4, 0] is empty"),
    "unknown tensor type": (head(tensors=1) + entry("a", 4, kind=4), "tensor 'a' has unknown type 4"),
    "ragged groups": (head(tensors=1) + entry("a", 33, kind=Q4_0), "they must be a multiple of 32"),
    "huge dimensions": (padded(head(tensors=1) + entry("a", HUGE, HUGE, HUGE, HUGE)), "'a' is outside the file"),
    "huge offset": (padded(head(tensors=1) + entry("a", 4, offset=HUGE), bytes(16)), "'a' is outside the file"),
    "misaligned": (padded(head(tensors=1) + entry("a", 1, offset=4), bytes(8)), "offset 4, not a multiple of 32"),
    "tensor twice": (padded(head(tensors=2) + entry("a", 1) * 2, bytes(4)), "tensor 'a' appears twice"),
    "overlap": (padded(head(tensors=2) + entry("a", 9) + entry("b", 1, offset=32), bytes(36)), "overlaps tensor 'a'"),
    "same place": (padded(head(tensors=2) + entry("a", 9) + entry("b", 9), bytes(36)), "overlaps tensor 'a'"),
    "trailing bytes": (padded(head(tensors=1) + entry("a", 1), bytes(36)), "32 bytes follow the last tensor"),
}


@pytest.mark.parametrize(("data", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_in_little_memory(path: Path, data: bytes, expected: str) -> None:
    tracemalloc.start()
    try:
        assert expected in reason(path, data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()


def test_the_hostile_headers_are_wrong_in_one_place_only(path: Path) -> None:
    """The builders make whole files when nothing is turned: else the cases above could fail for another reason."""
    header = head(tensors=2, fields=2) + field("a", BOOL, b"\1") + field("b", ARRAY, array(STRING, 1, string("x")))
    header += entry("a", 64, kind=Q4_0) + entry("b", 1, offset=64)
    found = parse(path, padded(header, bytes(68)))
    assert dict(found.fields) == {"a": True, "b": ["x"]} and list(found.tensors) == ["a", "b"]


def test_array_elements_are_limited_over_all_fields(path: Path) -> None:
    half = array(UINT8, 1 << 21, bytes(1 << 21))
    data = (
        head(fields=3) + field("a", ARRAY, half) + field("b", ARRAY, half) + field("c", ARRAY, array(UINT8, 1, b"\0"))
    )
    assert "element count of field 'c' is 1; the limit is 0" in reason(path, data)


def small_model(path: Path) -> bytes:
    return write_gguf(path, SMALLEST, init_weights(SMALLEST, 1), gguf.GGMLQuantizationType.Q4_1).read_bytes()


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    data = small_model(path)
    found = read_gguf(path)
    end = max(t.offset + t.num_bytes for t in found.tensors.values())
    cuts = [*range(found.data_offset), *range(found.data_offset, end, 499), end - 1]
    for cut in cuts:
        assert "truncated" in reason(path, data[:cut]), cut


def test_mutated_headers_never_crash_hang_or_eat_memory(path: Path) -> None:
    """10,000 seeded mutations end in a refusal, or in a header whose every tensor is inside the file."""
    data = small_model(path)
    header_end = read_gguf(path).data_offset
    outcomes = {"refused": 0, "read": 0}
    for seed in range(10_000):
        path.write_bytes(mutated(data, header_end, random.Random(seed)))
        # Tracing makes parsing several times slower, so it watches a tenth of them.
        if seed % 10 == 0:
            tracemalloc.start()
        try:
            found = read_gguf(path)
            config_from_gguf(found)
        except ModelFileError as error:
            assert error.path == str(path) and len(str(error)) < 2_000
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            spans = sorted((t.offset, t.offset + t.num_bytes) for t in found.tensors.values())
            assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
            assert spans[0][0] >= found.data_offset and spans[-1][1] <= found.file_bytes
        finally:
            if tracemalloc.is_tracing():
                assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
                tracemalloc.stop()
    assert outcomes["refused"] > 5_000 and outcomes["read"] > 100, outcomes


def mutated(data: bytes, header_end: int, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header_end)
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                extreme = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
                out[at : at + 8] = extreme.to_bytes(8, "little")
            case 3:
                del out[at : at + rng.randint(1, 16)]
            case 4:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(out)


def test_tensors_of_a_header_are_type_checked_lazily(path: Path) -> None:
    """A type that no code here can decode is still a well-formed header: the loader names the tensor."""
    assert parse(path, padded(head(tensors=1) + entry("a", 256, kind=12), bytes(144))).tensors["a"].num_bytes == 144
