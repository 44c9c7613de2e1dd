"""Which drafter serves a model if nobody says."""

from dataclasses import replace

import pytest

from outrider import drafts
from outrider.config import DraftConfig, DraftOptions
from outrider.drafts import with_drafter
from outrider.errors import ConfigError


@pytest.fixture
def head(tmp_path, monkeypatch):
    monkeypatch.setattr(drafts, "DEFAULT_HEAD", tmp_path)
    return str(tmp_path)


def chosen(model, **options):
    made = with_drafter(DraftOptions(**options), model)
    return made.speculative_algorithm, made.speculative_draft_model_path


def test_the_default_model_has_a_head(head):
    assert chosen("default") == ("EAGLE3", head)
    assert chosen("default", speculative_algorithm="EAGLE3") == ("EAGLE3", head)


@pytest.mark.parametrize("model", ["m", None])
def test_other_models_have_ngrams(head, model):
    assert chosen(model) == ("NGRAM", None)
    assert chosen(model, speculative_algorithm="EAGLE3") == ("EAGLE3", None)


def test_what_is_said_stays(head):
    assert chosen("default", speculative_algorithm="NONE") == ("NONE", None)
    assert chosen("default", speculative_algorithm="NEXTN") == ("NEXTN", None)
    mine = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "mine"}
    assert chosen("default", **mine) == ("EAGLE3", "mine")
    config = DraftConfig(model_path="default", draft_device="cpu")
    assert with_drafter(config, "default") == replace(
        config, speculative_algorithm="EAGLE3", speculative_draft_model_path=head
    )


def test_a_draft_that_is_named_needs_its_algorithm_named(head):
    with pytest.raises(ConfigError, match="needs --speculative-algorithm"):
        chosen("default", speculative_draft_model_path="mine")
