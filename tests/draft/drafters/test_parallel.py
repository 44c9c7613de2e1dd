"""P-EAGLE: trees of one pass against those of a plain twin, and files that do not fit."""

import math

import numpy as np
import pytest

from outrider.checkpoints.drafts import kind_of_draft
from outrider.errors import ConfigError
from outrider.serving.features import FeatureBlock
from services.draft.drafters.block_tree import BlockLimits, Candidates, best_paths
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.target import read_target
from services.draft.learning.algorithms.initial import initial_head
from tests.support.checkpoints.heads import parallel, write_head
from tests.support.draft.helpers import commit_of, feature_engine, request, settle
from tests.support.draft.trees import check_same_tree, tree_of
from tests.support.draft.twins.heads import Twin, norm
from tests.support.tiny import VOCAB, write_model

RNG = np.random.default_rng(5)
FEATURES = RNG.standard_normal((200, 48)).astype(np.float32)
COUNT = 5  # tokens that a pass predicts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = write_model(tmp_path_factory.mktemp("target"), tie_word_embeddings=False)
    made = parallel(target)
    return target, write_head(tmp_path_factory.mktemp("head"), *made), made


def expected_tree(twin, tokens):
    """Path scores by path: masks are rows of an EAGLE-3 head, with their own token and feature."""
    tensors, config = twin.tensors, twin.config
    masked = norm(tensors["mask_hidden"].reshape(-1), tensors["norm_before_fc.weight"], config["rms_norm_eps"])
    rows = len(tokens) - 1
    features = [*FEATURES[:rows], *[tensors["fc.weight"] @ masked] * (COUNT - 1)]
    logits = twin.logits([*tokens, *[config["pard_token"]] * (COUNT - 1)], np.array(features))[rows - 1 :]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    best = np.argsort(-log_p, axis=-1)[:, :4]
    ids = best + tensors["d2t"].astype(int)[best]
    edges = np.take_along_axis(log_p, best, axis=-1)[:, None]
    limits = BlockLimits(64, 16, math.log(2e-3), math.log(2e-3), {1})
    found = best_paths(Candidates(ids.tolist(), [[range(4)]] * COUNT, edges.tolist()), limits)
    paths, total = [], {}
    for token, parent, edge in zip(*found, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token))
        total[paths[-1]] = edge + total.get(above, 0.0)
    return total


def test_one_pass_predicts_what_a_plain_twin_does(pair):
    """Behind prompts longer than a chunk, features in pieces, and commits of several lengths, of two sessions."""
    target, folder, made = pair
    assert kind_of_draft(folder) == "EAGLE3"
    twin = Twin.of("EAGLE3", *made, target)
    engine = feature_engine("EAGLE3", folder, target, draft_page_size=4, precompile_bs_paddings=(2,))
    texts = {number: RNG.integers(5, VOCAB, length).tolist() for number, length in enumerate((90, 3))}

    def feed(number, first, stop=None):
        rows = FEATURES[first : len(texts[number]) - 1 if stop is None else stop]
        engine.receive_features([FeatureBlock(number, first, rows.view(np.uint8))])

    for number, tokens in texts.items():
        engine.open(request(number, tokens, max_tokens=90))
    feed(0, 0, 70)
    settle(engine)
    assert tree_of(engine, 0) == {}
    feed(0, 70)
    feed(1, 0)
    settle(engine)
    depths = set()
    for new, accepted in ((1, 2), (7, 0), (1, 0)):
        for number, tokens in texts.items():
            tree = tree_of(engine, number)
            depths.add(max(map(len, tree)))
            check_same_tree(tree, expected_tree(twin, tokens))
        for number, tokens in texts.items():
            path = max(tree_of(engine, number), key=len)[:accepted]
            added = [*path, *RNG.integers(5, VOCAB, new).tolist()]
            engine.receive([], [commit_of(tokens, added, number)])
            texts[number] = tokens + added
            feed(number, len(tokens) - 1)
        settle(engine)
    for number, tokens in texts.items():
        check_same_tree(tree_of(engine, number), expected_tree(twin, tokens))
        engine.close(number)
    engine.check()
    assert max(depths) == COUNT


def test_files_that_do_not_fit_are_refused(pair, tmp_path):
    target, folder, (config, tensors) = pair
    facts = read_target(target)
    settings = {"proposal_methods": [{"speculative_tokens": 3}]}
    own = write_head(tmp_path / "speculators", config | {"speculators_config": settings}, tensors)
    assert read_eagle3(own, facts).config.head.size == 4
    nameless = {key: value for key, value in config.items() if key != "pard_token"}
    with pytest.raises(ConfigError, match="must name its mask token"):
        read_eagle3(write_head(tmp_path / "nameless", nameless, tensors), facts)
    short = tensors | {"mask_hidden": tensors["mask_hidden"][:, :-1]}
    with pytest.raises(ConfigError, match=r"mask_hidden .* has 143 numbers, not the 144"):
        read_eagle3(write_head(tmp_path / "short", config, short), facts)
    with pytest.raises(ConfigError, match="a P-EAGLE head, which is not trained further"):
        initial_head("EAGLE3", folder, facts)
