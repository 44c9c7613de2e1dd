"""The drafter for --speculative-algorithm AUTO."""

from dataclasses import replace

import pytest

from outrider import drafts
from outrider.config import DraftConfig, DraftOptions
from outrider.drafts import resolve_drafter
from outrider.errors import ConfigError


@pytest.fixture
def head(tmp_path, monkeypatch):
    monkeypatch.setattr(drafts, "DEFAULT_HEAD", tmp_path)
    return str(tmp_path)


def chosen(model, *, own_place=True, **options):
    made = resolve_drafter(DraftOptions(**options), model, own_place=own_place)
    return made.speculative_algorithm, made.speculative_draft_model_path, made.speculative_ngram_beside


def test_the_default_model_has_a_head_beside_ngrams(head):
    assert chosen("default") == ("EAGLE3", head, True)


def test_on_the_targets_cores_n_grams_draft_unless_a_draft_model_is_asked_for(head):
    assert chosen("default", own_place=False) == ("NGRAM", None, False)
    assert chosen("default", own_place=False, speculative_algorithm="EAGLE3") == ("EAGLE3", head, False)
    assert chosen("default", own_place=False, draft_page_size=32) == ("EAGLE3", head, True)


def test_a_head_that_is_named_drafts_alone(head):
    assert chosen("default", speculative_algorithm="EAGLE3") == ("EAGLE3", head, False)
    named = {"speculative_algorithm": "EAGLE3", "speculative_ngram_beside": True}
    assert chosen("default", **named) == ("EAGLE3", head, True)


@pytest.mark.parametrize("model", ["m", None])
def test_other_models_have_ngrams(head, model):
    assert chosen(model) == ("NGRAM", None, False)
    assert chosen(model, speculative_algorithm="EAGLE3") == ("EAGLE3", None, False)


def test_explicit_flags_are_kept(head):
    assert chosen("default", speculative_algorithm="NONE") == ("NONE", None, False)
    assert chosen("default", speculative_algorithm="NEXTN") == ("NEXTN", None, False)
    mine = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "mine"}
    assert chosen("default", **mine) == ("EAGLE3", "mine", False)
    config = DraftConfig(model_path="default", draft_device="cpu")
    assert resolve_drafter(config, "default") == replace(
        config, speculative_algorithm="EAGLE3", speculative_draft_model_path=head, speculative_ngram_beside=True
    )


def test_a_named_draft_model_needs_its_algorithm(head):
    with pytest.raises(ConfigError, match="name it with --speculative-algorithm"):
        chosen("default", speculative_draft_model_path="mine")
