"""The bundled head of the default model: it exists, is small and complete, and documents its training."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from outrider.config import DraftConfig, DraftOptions
from outrider.drafts import DEFAULT_HEAD, resolve_drafter
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.target import TargetCheckpoint
from services.draft.process.weights import chosen_quantization
from tests.support.tiny import write_model

HIDDEN, VOCAB, LAYERS = 576, 49_152, 30  # of SmolLM2-135M-Instruct
LARGEST = 25 << 20  # bytes


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """The bundled head, read with a target of the default model's shape."""
    folder = write_model(tmp_path_factory.mktemp("target"), hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=1)
    return read_eagle3(DEFAULT_HEAD, TargetCheckpoint(folder, HIDDEN, VOCAB, LAYERS, (2,)))


def test_default_head_serves_the_default_model():
    chosen = resolve_drafter(DraftOptions(), "default")
    assert (chosen.speculative_algorithm, chosen.speculative_draft_model_path) == ("EAGLE3", str(DEFAULT_HEAD))


def test_default_head_is_small_and_complete(draft):
    assert sum(file.stat().st_size for file in DEFAULT_HEAD.iterdir()) < LARGEST
    params = draft.load(jnp.float32)
    assert params["head"].shape == (HIDDEN, draft.config.vocab_size)
    assert len(np.unique(params["ids"])) == draft.config.vocab_size
    assert all(np.isfinite(leaf).all() for leaf in (params["head"], params["norm"], params["layers"][0]["qkv"]))


def test_default_head_documents_its_training():
    report = json.loads((DEFAULT_HEAD / "training.json").read_text())
    assert report["settings"]["algorithm"] == "EAGLE3"
    assert (DEFAULT_HEAD / "curves.png").is_file()
    assert report["evaluation"]["tree"]["temperature 0"]["accept_length"] > 2


@pytest.mark.parametrize(
    ("options", "backend", "expected"),
    [
        ({}, "cpu", "int8"), ({}, "plain", None), ({"speculative_draft_model_path": "mine"}, "cpu", None),
        ({"speculative_draft_model_quantization": "unquant"}, "cpu", "unquant"),
    ],
)  # fmt: skip
def test_default_head_is_quantized_on_cpus(options, backend, expected):
    config = DraftConfig(
        **{"speculative_algorithm": "EAGLE3"} | {"speculative_draft_model_path": str(DEFAULT_HEAD)} | options
    )
    assert chosen_quantization(config, backend) == expected
