"""FR-Spec: files of frequent tokens, a shorter head, probabilities among its entries, noise by the target's ids."""

import numpy as np
import pytest

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams
from services.draft.formats.token_map import read_token_map
from services.draft.process.app import build
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.draft.helpers import feature_engine, request, settle, standalone, torch_logits
from tests.support.draft.token_maps import IDS, PROMPT, write_map
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def model(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"), tie_word_embeddings=request.param)


def test_each_id_once_in_the_order_of_the_file(tmp_path):
    path = write_map(tmp_path, [*IDS, IDS[5], IDS[0]])
    assert read_token_map(path, VOCAB).tolist() == IDS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must hold a list of token ids"),
        ([1, 2.5], "must hold a list of token ids"),
        ({"a": 1}, "must hold a list of token ids"),
        ([3, VOCAB], f"from 3 to {VOCAB}, but the head has {VOCAB} entries"),
        ([-1, 2], "from -1 to 2"),
        (print, "more than tensors"),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        read_token_map(write_map(tmp_path, content), VOCAB)


def test_a_map_beside_the_weights_is_read(tmp_path):
    """In JSON; a flag overrides it. A broken one is refused."""
    model = write_model(tmp_path / "llama")
    (model / "token_map.json").write_text(str(IDS))
    assert standalone(model).drafter.runner.config.vocab_size == len(IDS)
    flag = write_map(tmp_path, IDS[:9])
    assert standalone(model, speculative_token_map=flag).drafter.runner.config.vocab_size == 9
    (model / "token_map.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match="is no JSON"):
        standalone(model)


def test_missing_file_is_refused():
    with pytest.raises(ConfigError, match="there is no file"):
        read_token_map("/no/such/freq.pt", VOCAB)


@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(0.8, seed=7)], ids=["greedy", "sampled"])
def test_candidates_are_those_of_the_subset(tmp_path, model, sampling):
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 13}
    engine = standalone(model, speculative_token_map=write_map(tmp_path, [*IDS, IDS[1]]), **flags)
    engine.open(request(1, PROMPT, sampling))
    settle(engine)
    (session,) = engine.running.values()
    tree, next_logits = session.tree, torch_logits(model)
    assert set(tree.token) <= set(IDS)
    for node in (-1, *tree.root_children):
        path = PROMPT + tree.path_tokens(node)
        logits = next_logits(path)[IDS].astype(np.float64)
        if not sampling.greedy:
            log_p = logits / sampling.temperature
            log_p -= np.log(np.exp(log_p - log_p.max()).sum()) + log_p.max()
            logits = log_p + noise.gumbel(sampling.seed, np.array([len(path)]), np.array(IDS))[0]
        scores = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-scores)
        children = tree.children_of(node)
        assert len(children) == 3
        assert [tree.token[i] for i in children] == [IDS[i] for i in best[: len(children)]]
        np.testing.assert_allclose([tree.log_score[i] for i in children], scores[best[: len(children)]], atol=1e-4)


def test_handshake_has_the_whole_vocabulary(tmp_path, model):
    path = write_map(tmp_path, IDS)
    flags = {"speculative_draft_model_path": str(model), "speculative_token_map": path}
    _, info = build(
        DraftConfig(speculative_algorithm="STANDALONE", draft_max_total_tokens=512, max_running_requests=2, **flags)
    )
    assert info.vocab_size == VOCAB


def test_eagle_has_a_map_and_eagle3_ignores_it(tmp_path, model, caplog):
    path = write_map(tmp_path, IDS)
    head = write_head(tmp_path / "eagle", *eagle(model))
    runner = feature_engine("EAGLE", head, model, speculative_token_map=path).drafter.runner
    assert runner.config.vocab_size == len(IDS)
    assert runner.params["head"].shape == (48, len(IDS))
    assert runner.params["embed"].shape == (VOCAB, 48)
    head = write_head(tmp_path / "eagle3", *eagle3(model))
    runner = feature_engine("EAGLE3", head, model, speculative_token_map=path).drafter.runner
    assert runner.config.vocab_size == 200
    assert "is ignored" in caplog.text
