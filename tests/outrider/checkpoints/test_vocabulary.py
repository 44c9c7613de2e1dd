"""A draft model with other token ids is refused, before it is loaded if the files show the difference."""

import contextlib
import json

import pytest

from outrider.checkpoints.vocabulary import Vocabulary, check_same, of_checkpoint
from outrider.config import DraftOptions, ServeConfig
from outrider.config.target import TargetOptions
from outrider.errors import ConfigError
from outrider.supervisor.app import prepare_models
from outrider.supervisor.display import Display
from tests.support.tiny import VOCAB, write_model, write_tokenizer


@pytest.mark.parametrize(("draft", "fits"), [
    (("", 320), True), (("", 300), False), (("", 0), True), (("a", 300), True), (("b", 320), False),
])  # fmt: skip
def test_tokenizers_decide_and_where_there_are_none_sizes_do(draft, fits):
    draft, target = Vocabulary("small", draft[1], draft[0]), Vocabulary("large", 320, "a")
    if fits:
        check_same(draft, target)
        return
    with pytest.raises(ConfigError, match=r"of the draft model small and the target's large differ: .*, not (a|320);"):
        check_same(draft, target)


def test_the_vocabulary_is_read_from_files(tmp_path):
    folder = write_tokenizer(write_model(tmp_path / "model"))
    expected = of_checkpoint(folder, "x")
    assert expected.size == VOCAB
    assert expected.hash
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": config.pop("vocab_size")}} | config))
    (folder / "tokenizer.json").unlink()
    assert of_checkpoint(folder, "x") == Vocabulary("x", VOCAB, "")


@pytest.mark.parametrize(("algorithm", "refusal"), [
    ("STANDALONE", pytest.raises(ConfigError, match=f"300 tokens, not {VOCAB}")),
    ("EAGLE", contextlib.nullcontext()),
])  # fmt: skip
def test_serve_compares_vocabularies_of_a_required_draft_before_it_starts_processes(tmp_path, algorithm, refusal):
    """A head uses its target's tokens, whatever its own files contain."""
    target, draft = (str(write_model(tmp_path / str(vocab), vocab=vocab)) for vocab in (VOCAB, 300))
    options = DraftOptions(speculative_algorithm=algorithm, speculative_draft_model_path=draft)
    config = ServeConfig(target=TargetOptions(model_path=target), draft=options, require_draft=True)
    with refusal, contextlib.closing(Display()) as display:
        prepare_models(config, display)
