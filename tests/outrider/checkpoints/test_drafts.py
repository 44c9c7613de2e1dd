"""The drafter of a published checkpoint, from its configuration and the names of its tensors."""

import json

import pytest

from outrider.checkpoints.drafts import has_mtp_layers, kind_of_draft
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from services.draft.formats.mtp import holds_mtp
from tests.support.checkpoints.blocks import dflash
from tests.support.checkpoints.heads import write_head, write_pair
from tests.support.checkpoints.mtp import PREFIXES, write_mtp
from tests.support.tiny import write_model


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_heads(tmp_path, kind):
    target, head, _ = write_pair(tmp_path, kind)
    assert kind_of_draft(head) == kind
    assert kind_of_draft(target) == "STANDALONE"
    assert not has_mtp_layers(target)
    assert kind_of_draft(DEFAULT_HEAD) == "EAGLE3"


def test_block_drafters(tmp_path):
    target = write_model(tmp_path / "target")
    assert kind_of_draft(write_head(tmp_path / "draft", *dflash(target))) == "DFLASH"


@pytest.mark.parametrize("family", PREFIXES)
def test_mtp_layers_are_found_as_their_reader_finds_them(tmp_path, family):
    folder = write_mtp(tmp_path, family)
    assert has_mtp_layers(folder)
    assert holds_mtp(folder)
    assert kind_of_draft(folder) == "NEXTN"


def test_a_sharded_checkpoint_is_read_from_its_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"model.layers.0.eh_proj.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert has_mtp_layers(tmp_path)


def test_folders_that_cannot_be_read_hold_no_mtp_layers(tmp_path):
    assert not has_mtp_layers(tmp_path)
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\\xff" * 100)
    assert not has_mtp_layers(folder)
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        kind_of_draft(tmp_path)
