"""Pickles of tensors as trainers write them, and pickles that no trainer writes."""

import io
import os
import pickle
import sys
import types
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from outrider.errors import ConfigError
from services.target.model.loading.updates import take
from services.target.process.weights.incoming import IncomingPickle
from services.target.process.weights.pickles import named_tensors

LIMIT = 1 << 20
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.arange(5, dtype=torch.bfloat16),
    "c.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
    "d.weight": torch.tensor(2.5),
}


@dataclass
class FlattenedTensorMetadata:
    """As SGLang's class of this name."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@pytest.fixture(scope="module", autouse=True)
def of_sglang():
    """The class is pickled under the module that has it in SGLang."""
    name = "sglang.srt.weight_sync.tensor_bucket"
    parts = name.split(".")
    made = {".".join(parts[: i + 1]): types.ModuleType(".".join(parts[: i + 1])) for i in range(len(parts))}
    made[name].FlattenedTensorMetadata = FlattenedTensorMetadata
    FlattenedTensorMetadata.__module__ = name
    sys.modules.update(made)
    yield
    for one in made:
        del sys.modules[one]


def shared(content):
    """As SGLang serializes: tensors are in shared memory."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(content)
        return buffer.getvalue()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def bucket(tensors, *, as_bytes):
    """A flattened bucket; as bytes it holds tensors of several dtypes."""
    place, parts, metadata = 0, [], []
    for name, tensor in tensors.items():
        flat = tensor.flatten().view(torch.uint8) if as_bytes else tensor.flatten()
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, place, place + len(flat), len(flat)))
        place += len(flat)
        parts.append(flat)
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("write", [pickle.dumps, shared])
@pytest.mark.parametrize("shape", [dict, lambda tensors: list(tensors.items())])
def test_pairs(write, shape):
    content = shape(TENSORS | {"e.weight": torch.nn.Parameter(torch.ones(2)), "f": torch.empty(0)})
    same(named_tensors(write(content), LIMIT), dict(content))


def test_views_of_one_storage_count_once():
    flat = torch.arange(1 << 10, dtype=torch.float32)
    views = {str(i): part for i, part in enumerate(flat.chunk(8))}
    same(named_tensors(shared(views), 5 << 10), views)


@pytest.mark.parametrize("write", [pickle.dumps, shared])
def test_buckets(write):
    floats = {name: tensor for name, tensor in TENSORS.items() if tensor.dtype == torch.float32}
    same(named_tensors(write(bucket(floats, as_bytes=False)), LIMIT), floats)
    odd = {"z": torch.ones(3, dtype=torch.uint8)} | TENSORS  # the others start at odd bytes
    same(named_tensors(write(bucket(odd, as_bytes=True)), LIMIT), odd)
    outside = bucket(floats, as_bytes=False)
    outside["metadata"][-1].end_idx += 1
    with pytest.raises(ConfigError, match="outside of it"):
        named_tensors(write(outside), LIMIT)


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function, *args):
        self.how = function, args

    def __reduce__(self):
        return self.how


@dataclass
class State:
    """Its pickle sets the state of an object."""

    of: object
    state: object

    def __reduce__(self):
        return (type(self.of), (), self.state)


@pytest.mark.parametrize(("content", "words"), [
    ([("a", Calls(os.system, "false"))], r"names posix\.system"),
    ([("a", Calls(eval, "1"))], r"names builtins\.eval"),
    ([("a", Calls(torch.load, "file"))], r"names torch\.serialization\.load"),
    ([("a", Calls(torch.hub.load, "x", "y"))], "not on the list"),
    ([("a", Calls(torch.multiprocessing.reductions.rebuild_storage_filename, torch.UntypedStorage, b"", b"/x", 4))],
     "no name of PyTorch's shared memory"),
    ([("a", Calls(torch.multiprocessing.reductions.rebuild_storage_filename, torch.UntypedStorage, b"",
                  b"/torch_1_2_3", 4))], "cannot be read on this machine"),
    ([("a", Calls(torch.multiprocessing.reductions.rebuild_storage_filename, torch.UntypedStorage, b"",
                  b"/torch_1_2_3", 2 << 20))], "larger than the model's"),
    ([("a", Calls(torch.multiprocessing.reductions.rebuild_cuda_tensor, torch.Tensor, *range(14)))], "on a GPU"),
    ([("a", Calls(torch._utils._rebuild_tensor_v2, torch.ones(2).untyped_storage(), 0, (1 << 40,), (1,)))], "pickle"),
    ([("a", torch.ones(1 << 19))], "larger than the model's"),
    ([("a", 1)], "no name and tensor"),
    ([("a", torch.ones(1)), ("a", torch.ones(1))], "a twice"),
    ([1], "no pickle of tensors"),
    (1, "neither pairs"),
    ({"flattened_tensor": 1, "metadata": []}, "no tensor"),
    ([("a", Calls(torch.storage._load_from_bytes, b"PK" + bytes(9)))], "an archive"),
    ({"flattened_tensor": torch.ones(1).expand(1 << 12, 1 << 12), "metadata": []}, "larger than the model's"),
    ({"flattened_tensor": torch.ones(1 << 15), "metadata": [
        FlattenedTensorMetadata(str(i), torch.Size([1 << 15]), torch.float64, 0, 1 << 15, 1 << 15) for i in range(9)
    ]}, "larger than the model's"),
])  # fmt: skip
def test_what_no_trainer_writes_is_refused(content, words):
    with pytest.raises(ConfigError, match=words):
        named_tensors(pickle.dumps(content), LIMIT)


def test_descriptors_are_refused_with_the_way_out():
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([("a", torch.ones(3))])
    with pytest.raises(ConfigError, match="set_sharing_strategy"):
        named_tensors(buffer.getvalue(), LIMIT)


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_damaged_pickles_are_refused(cut):
    content = pickle.dumps(list(TENSORS.items()))
    with pytest.raises(ConfigError):
        named_tensors(content[:cut], LIMIT)


def test_a_pickle_in_parts_is_bounded_and_checked():
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    incoming = IncomingPickle(shapes, {}, cuda=False)
    content = pickle.dumps(TENSORS)
    for start in range(0, len(content), 100):
        incoming.add(content[start : start + 100])
    incoming.finish()
    same(incoming.tensors, TENSORS)
    assert incoming.digests == take(TENSORS, shapes, {}).digests
    with pytest.raises(ConfigError, match="at most"):
        IncomingPickle(shapes, {}, cuda=False).add(bytes(2 << 20))
    for wrong, words in (({"x": torch.ones(1)}, "names: x"), ({"d.weight": torch.ones(3)}, "shape")):
        incoming = IncomingPickle(shapes, {}, cuda=False)
        incoming.add(pickle.dumps(wrong))
        with pytest.raises(ConfigError, match=words):
            incoming.finish()
