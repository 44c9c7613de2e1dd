"""An external corpus: supported and refused files; NGRAM copies from it within its budget and never changes it."""

import json
import logging

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.speculation.proposal import Commit, path_hash
from services.draft.drafters.ngram import joined
from services.draft.ngrams import corpus
from services.draft.ngrams.base import Continuations, NgramOptions
from services.draft.ngrams.compiled import CompiledNgrams
from services.draft.ngrams.corpus import documents, read_corpus
from services.draft.ngrams.plain import PlainNgrams
from tests.support.draft.helpers import ngram, request, settle
from tests.support.tiny import write_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a tokenizer with one token per byte, and the files of a model's folder."""
    folder = write_tokenizer(tmp_path_factory.mktemp("target"))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def ids(target, text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(target / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_documents_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_PART", 8)
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n"two"\n{"content": "three", "id": 3}\n')
    (tmp_path / "b" / "c.txt").write_text("the first line\nand the second\n")
    assert list(documents(tmp_path)) == ["one", "two", "three", "the first line\n", "and the second\n"]
    assert list(documents(tmp_path / "a.jsonl")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 of .* is not JSON"),
        ('"x"\n{"body": "x"}', "line 2 of .* is not a document"),
        (b"\xff\xfe", "as text"),
    ],
)
def test_unreadable_corpora_are_refused(tmp_path, content, message):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        list(documents(file))


def flags(path, target, **more):
    options = {"speculative_ngram_external_sam_budget": 4} | more
    return {"speculative_ngram_external_corpus_path": str(path), "model_path": str(target), **options}


def test_a_corpus_is_copied_from_within_its_budget(tmp_path, target):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "once upon a time there was"}))
    engine = ngram(**flags(tmp_path, target, speculative_ngram_insert_prompts=False))
    opened = ids(target, "and once upon a")
    engine.open(request(1, opened))
    first = engine.step().proposals[0]
    assert first.tokens[:4].tolist() == ids(target, " tim")
    settle(engine)
    engine.flush()
    engine.close(1)
    engine.open(request(2, opened))
    again = engine.step().proposals[0]
    assert again.tokens[:4].tolist() == ids(target, " tim")  # a flush leaves it as it is
    drafter = engine.drafter
    assert len(drafter.corpus.look_up(np.array(opened, np.uint32), None).tokens) == 4


@pytest.mark.parametrize("budget", [4, 11])
def test_sessions_update_the_corpus_accuracy_but_not_its_texts(tmp_path, target, budget):
    (tmp_path / "corpus.txt").write_text("abcdefgh")
    engine = ngram(**flags(tmp_path / "corpus.txt", target, speculative_ngram_external_sam_budget=budget))
    corpus = engine.drafter.corpus
    size, accuracy = len(corpus), corpus.accuracy(3, noisy=False)
    tokens, new = ids(target, "xabc"), ids(target, "defghz")
    engine.open(request(1, tokens))
    settle(engine)
    for token in new[:5]:
        path = path_hash(np.array([*tokens, token]))
        engine.receive([], [Commit(1, len(tokens), np.array([token], np.uint32), path)])
        tokens = [*tokens, token]
        settle(engine)
    assert len(corpus) == size
    assert corpus.accuracy(3, noisy=False) > accuracy


def test_equal_nodes_of_sessions_and_corpus_are_merged(tmp_path, target):
    (tmp_path / "corpus.txt").write_text("abcdefgh")
    only = {"speculative_num_draft_tokens": 3, "speculative_ngram_external_sam_budget": 1}  # a node of each
    engine = ngram(**flags(tmp_path / "corpus.txt", target, **only))
    tokens = ids(target, "abcdefghxabc")
    engine.open(request(1, tokens))
    for token in ids(target, "defgh"):
        settle(engine)
        tree = engine.running[1].tree
        assert len(set(tree.hash)) == len(tree)
        tokens = [*tokens, token]
        commit = Commit(1, len(tokens) - 1, np.array([token], np.uint32), path_hash(np.array(tokens)))
        engine.receive([], [commit])


def test_joined_continuations_are_those_of_both():
    first = Continuations([5, 6, 7], [-1, 0, -1], [-0.5, -1.0, -2.0])
    second = Continuations([7, 5, 6, 8, 9], [-1, -1, 1, 2, 0], [-0.1, -0.7, -0.2, -0.3, -0.4])
    both = joined(first, second)
    assert both == ([5, 6, 7, 8, 9], [-1, 0, -1, 1, 2], [-0.5, -0.2, -0.1, -0.3, -0.4])


@pytest.mark.parametrize("kind", [PlainNgrams, CompiledNgrams])
def test_memory_and_tokens_are_bounded(tmp_path, target, kind, caplog):
    text = "".join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 26, 300))
    (tmp_path / "corpus.txt").write_text(text)
    store = kind(NgramOptions(capacity=500))
    with caplog.at_level(logging.INFO):
        assert read_corpus(tmp_path, target, store, 500, 300) == 300
    assert len(store) == 500
    assert "the corpus exceeds 500 nodes" in caplog.text
    assert "1 documents, 300 tokens" in caplog.text
    with pytest.raises(ConfigError, match="more than 299 tokens"):
        read_corpus(tmp_path, target, kind(NgramOptions(capacity=500)), 500, 299)
    with pytest.raises(ConfigError, match="has none"):
        read_corpus(tmp_path, tmp_path, store, 500, 300)


def test_documents_are_read_whole(tmp_path, target):
    """Some tokenizers are published with truncation or padding to a length."""
    from tokenizers import Tokenizer

    folder = tmp_path / "cutting"
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "corpus.jsonl").write_text('"abcdefghijklmnopqrst"\n"xyz"\n')
    store = PlainNgrams(NgramOptions(capacity=500))
    assert read_corpus(tmp_path / "corpus.jsonl", folder, store, 500, 500) == 23
