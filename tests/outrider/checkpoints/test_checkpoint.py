"""Finding a model's files: accepted locations, and clear errors for all others."""

import ctypes
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder):
    save_file({"b": np.ones(2, np.float32)}, folder / "model-2.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_folders_are_taken_as_they_are(folder):
    assert checkpoint.resolve(str(folder)) == folder
    shard(folder)
    assert [f.name for f in checkpoint.weight_files(checkpoint.resolve(str(folder)))] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


def test_an_index_of_other_files_beside_a_whole_model_is_passed_over(folder):
    """As in `transformers`, which reads the target's weights: all readers choose the same files."""
    shard(folder)
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model-2.safetensors").unlink()
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model-1.safetensors").rename(folder / "mtp.safetensors")  # layers for drafting
    index = {"weight_map": {"a": "model.safetensors", "b": "mtp.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors", folder / "mtp.safetensors"]


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}'])
def test_an_index_that_names_no_files_is_refused_by_name(folder, index):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json names no weight files"):
        checkpoint.weight_files(folder)


def test_weights_that_torch_saved_are_for_drafts_alone(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert checkpoint.weight_files(folder, torch_files=True) == [folder / "pytorch_model.bin"]
    with pytest.raises(ConfigError, match=r"no weights.*pytorch_model\.bin, save the model again as safetensors"):
        checkpoint.resolve(str(folder))


def test_missing_pieces_are_named(folder):
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        checkpoint.resolve(str(folder))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        checkpoint.resolve(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checkpoint.resolve(str(folder))


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "/nowhere/model.gguf", "one-word", "a/b/c"])
def test_paths_that_do_not_exist_are_refused(path):
    with pytest.raises(ConfigError, match="there is no"):
        checkpoint.resolve(path)


@pytest.fixture
def unprivileged_user():
    """Reads files as a user without privileges, if the tests run as root."""
    libc = ctypes.CDLL(None)
    libc.setfsuid(65534)
    yield
    libc.setfsuid(os.geteuid())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", ""])
def test_an_unreadable_file_is_named(name, unprivileged_user):
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        folder = Path(top) / "model"
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")
        assert checkpoint.resolve(str(folder)) == folder
        (folder / name).chmod(0)
        try:
            with pytest.raises(
                ConfigError, match=f"{folder / name}.* cannot be read: Permission denied; .* runs as user"
            ):
                checkpoint.resolve(str(folder))
        finally:
            (folder / name).chmod(0o700)


def test_an_unreadable_gguf_file_is_named(unprivileged_user):
    with tempfile.NamedTemporaryFile(dir="/tmp", suffix=".gguf") as file:
        os.chmod(file.name, 0)
        with pytest.raises(ConfigError, match=f"{file.name} cannot be read: Permission denied"):
            checkpoint.resolve(file.name)


def test_an_impossible_path_is_refused():
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        checkpoint.resolve("/" + "x" * 300)


def test_an_id_that_the_hub_cannot_give_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="org/some-model"):
        checkpoint.resolve("org/some-model")


def test_no_weights_are_fetched_twice():
    """Duplicate weights in other layouts are not downloaded."""
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "modeling_own.py"]
    others = ["original/model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    wanted = filter_repo_objects(
        [*files, *others], allow_patterns=checkpoint.HUB_FILES, ignore_patterns=checkpoint.HUB_DUPLICATES
    )
    assert list(wanted) == files


def test_weights_that_lie_there_twice_are_read_once(folder):
    """Weights in another layout, beside the usual one or alone."""
    before = checkpoint.fingerprint(folder)
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        save_file({"tok_embeddings.weight": np.zeros(3, np.float32)}, folder / name)
    assert [file.name for file in checkpoint.weight_files(folder)] == ["model.safetensors"]
    assert checkpoint.fingerprint(folder) == before
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        checkpoint.resolve(str(folder))


def test_fingerprints_of_different_checkpoints_differ(folder):
    first = checkpoint.fingerprint(folder)
    assert first == checkpoint.fingerprint(folder)
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    assert checkpoint.fingerprint(folder) != first


def test_vocabularies_are_compared_by_content(folder):
    assert checkpoint.vocab_hash(folder) == ""

    def hash_of(vocab, added=()):
        content = {"model": {"vocab": vocab}, "added_tokens": list(added)}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return checkpoint.vocab_hash(folder)

    assert hash_of({"a": 0, "b": 1}) == hash_of({"b": 1, "a": 0}) == hash_of([["a", -1.0], ["b", -2.0]])
    assert hash_of({"a": 0, "b": 1}) != hash_of({"a": 1, "b": 0})
    assert hash_of({"a": 0}, [{"content": "b", "id": 1}]) == hash_of({"a": 0, "b": 1})


def test_json_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="no valid JSON"):
        checkpoint.load_json(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="missing"):
        checkpoint.load_json(tmp_path / "absent.json")
