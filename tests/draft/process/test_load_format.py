"""--speculative-draft-load-format, revisions, and the two names of EAGLE."""

import json
import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from services.draft.process import checkpoints
from services.draft.process.app import build
from services.draft.process.flags import check
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.helpers import request, settle, standalone
from tests.support.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return write_tokenizer(write_model(folder, num_hidden_layers=8, tie_word_embeddings=False))


def config(algorithm, folder, target, **flags):
    return DraftConfig(
        speculative_algorithm=algorithm, speculative_draft_model_path=str(folder), model_path=str(target),
        max_running_requests=1, draft_max_total_tokens=1024, draft_dtype="float32", draft_attention_backend="plain",
        **flags,
    )  # fmt: skip


def params(made, folder):
    draft, _ = checkpoints.read_draft(folder, made)
    return draft.load(jnp.float32)


def numbers(tree):
    return {str(path): np.asarray(leaf) for path, leaf in _leaves(tree)}


def _leaves(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
    else:
        for name, value in items:
            yield from _leaves(value, (*path, name))


@pytest.fixture
def both(tmp_path, target):
    """A head with different weights in the two kinds of files."""
    settings, tensors = eagle(target)
    write_head(tmp_path, settings, tensors)
    write_head(tmp_path, settings, {name: 2 * array for name, array in tensors.items()}, torch_file=True)
    return tmp_path, tensors["fc.weight"].T


def test_the_format_names_the_files(both, target):
    folder, fuse = both
    for load_format, factor in (("auto", 1), ("safetensors", 1), ("pt", 2)):
        found = params(config("EAGLE", folder, target, speculative_draft_load_format=load_format), folder)
        np.testing.assert_array_equal(found["fuse"], factor * fuse)
    (folder / "model.safetensors").unlink()
    assert checkpoints.draft_folder(config("EAGLE", folder, target)) == folder
    with pytest.raises(ConfigError, match=r"has no weights; expected model\.safetensors"):
        checkpoints.draft_folder(config("EAGLE", folder, target, speculative_draft_load_format="safetensors"))
    (folder / "pytorch_model.bin").rename(folder / "other")
    with pytest.raises(ConfigError, match=r"has no weights; expected pytorch_model\.bin"):
        checkpoints.draft_folder(config("EAGLE", folder, target, speculative_draft_load_format="pt"))


def shapes(tree):
    return {name: array.shape for name, array in numbers(tree).items()}


@pytest.mark.parametrize(("algorithm", "kind"), [("EAGLE", eagle), ("EAGLE3", eagle3)])
def test_random_weights_of_a_head_without_weights(algorithm, kind, target, tmp_path):
    settings, tensors = kind(target)
    whole = write_head(tmp_path / "whole", settings, tensors)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(settings))
    dummy = config(algorithm, tmp_path / "bare", target, speculative_draft_load_format="dummy")
    made = params(dummy, tmp_path / "bare")
    assert shapes(made) == shapes(params(config(algorithm, whole, target), whole))
    again = numbers(params(dummy, tmp_path / "bare"))
    assert all(np.array_equal(array, again[name]) for name, array in numbers(made).items())
    random = numbers(params(config(algorithm, whole, target, speculative_draft_load_format="dummy"), whole))
    real = numbers(params(config(algorithm, whole, target), whole))
    assert any(not np.array_equal(array, random[name]) for name, array in real.items())
    engine, facts = build(dummy)
    assert facts.fingerprint == "dummy"
    engine.check()


def test_random_weights_of_a_decoder_draft(target, tmp_path):
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    write_tokenizer(tmp_path)
    engine = standalone(
        tmp_path, speculative_draft_load_format="dummy", draft_attention_backend="plain",
        speculative_num_steps=2, speculative_eagle_topk=1, speculative_num_draft_tokens=3,
    )  # fmt: skip
    engine.open(request(1, [5, 6, 7, 8]))
    assert any(output.proposals for output in settle(engine))


def test_random_weights_of_mtp_layers_have_the_shapes_of_the_file(tmp_path):
    folder = write_mtp(tmp_path / "target", "glm-4.5")
    made = config("NEXTN", folder, folder)
    real, random = (params(replace(made, speculative_draft_load_format=name), folder) for name in ("auto", "dummy"))
    assert shapes(random) == shapes(real)
    assert not np.array_equal(random["fuse"], real["fuse"])
    np.testing.assert_array_equal(random["head"], real["head"])  # which is the target's


def test_online_learning_needs_weights(target):
    with pytest.raises(ConfigError, match=r"--online trains the draft's weights, and .* dummy has random ones"):
        check(config("EAGLE3", "x", target, speculative_draft_load_format="dummy", online=True))


# --- NEXTN and EAGLE ---


def test_nextn_reads_an_eagle_head_also_for_a_target_without_mtp_layers(both, target, caplog):
    folder, fuse = both
    np.testing.assert_array_equal(params(config("NEXTN", folder, target), folder)["fuse"], fuse)
    with caplog.at_level(logging.WARNING):
        params(config("NEXTN", folder, target, enable_multi_layer_eagle=True), folder)
    assert "--enable-multi-layer-eagle has no effect" in caplog.text


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_both_names_read_mtp_layers_of_the_target_and_of_a_folder(algorithm, tmp_path):
    folder = write_mtp(tmp_path / "target", "glm-4.5")
    own = params(config(algorithm, folder, folder), folder)
    assert own["fuse"].shape == (96, 48)
    other = write_mtp(tmp_path / "other", "glm-4.5")
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    safetensors.numpy.save_file({name: 2 * tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    np.testing.assert_array_equal(params(config(algorithm, other, folder), other)["fuse"], 2 * own["fuse"])


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_both_names_need_a_head_or_mtp_layers(algorithm, target):
    made = DraftConfig(speculative_algorithm=algorithm, model_path=str(target))
    with pytest.raises(ConfigError, match=r"has no MTP layer"):
        checkpoints.read_draft(target, made)


# --- revisions and batch sizes ---


def test_a_revision_is_asked_of_the_hub(monkeypatch, tmp_path, target):
    asked = []

    def download(repository, *, revision, allow_patterns, ignore_patterns=()):
        asked.append((repository, revision, tuple(allow_patterns), tuple(ignore_patterns)))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings, tensors = eagle(target)
    write_head(tmp_path, settings, tensors, torch_file=True)
    made = config("EAGLE", "a/b@67caf31", target)
    assert checkpoints.draft_folder(made) == tmp_path
    made = config(
        "EAGLE", "a/b", target, speculative_draft_model_revision="refs/pr/1", speculative_draft_load_format="pt"
    )
    checkpoints.draft_folder(made)
    assert [(repository, revision) for repository, revision, *_ in asked] == [
        ("a/b", "67caf31"), ("a/b", "67caf31"), ("a/b", "refs/pr/1"), ("a/b", "refs/pr/1"),
    ]  # fmt: skip
    assert "*.safetensors" in asked[2][3]  # with pt no safetensors are fetched
    assert asked[1][2] == asked[3][2] == ("pytorch_model*.bin",)
    asked.clear()
    checkpoints.draft_folder(config("EAGLE", "a/b", target, speculative_draft_load_format="dummy"))
    assert len(asked) == 1
    assert "*.safetensors" in asked[0][3]
    with pytest.raises(ConfigError, match="names another revision than x; leave one of them out"):
        checkpoints.draft_folder(config("EAGLE", "a/b@y", target, speculative_draft_model_revision="x"))


def test_batch_sizes_that_are_compiled(tmp_path):
    folder = write_model(tmp_path)
    drafter = standalone(folder, precompile_bs_paddings=(8, 16, 32), max_running_requests=12).drafter
    assert {shape.sessions for shape in drafter.shapes} == {1, 8, 16}
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    drafter = standalone(folder, precompile_bs_paddings=(2,), **tree).drafter
    assert {(shape.sessions, shape.rows) for shape in drafter.shapes if shape.heads > 1} == {
        (1, 2),
        (1, 3),
        (2, 2),
        (2, 3),
    }
    with pytest.raises(ConfigError, match="--precompile-bs-paddings needs batch sizes of 1 or more"):
        standalone(folder, precompile_bs_paddings=(0,))
