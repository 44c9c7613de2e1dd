"""Acceptance thresholds: exact at 1, and below it what they say, in sampled text alone."""

import logging

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.errors import ConfigError
from outrider.speculation import noise
from outrider.speculation.acceptance import Thresholds
from outrider.speculation.sampling import SamplingParams, filtered_log_probs
from outrider.speculation.tree import ROOT, TreeSlice
from services.target.sampling import row_params, sampler
from services.target.sampling.thresholds import relax
from services.target.step.batch import SessionWork
from tests.support.target.driving import GREEDY, chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import write_model

P = np.array([0.35, 0.25, 0.15, 0.12, 0.08, 0.05])
CPU = torch.device("cpu")


def siblings(*tokens) -> TreeSlice:
    count = len(tokens)
    return TreeSlice(
        np.array(tokens, np.uint32),
        np.full(count, ROOT, np.int32),
        np.ones(count, np.int32),
        np.zeros(count, np.float32),
    )


def accepted(thresholds, tokens, count=30_000):
    """How often each token comes first, over many positions of one seed."""
    draft, positions = siblings(*tokens), np.arange(count)
    samples = (np.log(P) + noise.gumbel(5, positions, np.arange(len(P)))).argmax(axis=1)
    rest = np.zeros(len(tokens), np.int64)
    first = [
        thresholds.relax(draft, np.append(drawn, rest), P[list(tokens)], np.append(coin, rest))[0]
        for drawn, coin in zip(samples, noise.coins(5, positions), strict=True)
    ]
    return np.bincount(first, minlength=len(P))


def fits(counts, p):
    p = np.array(p) / np.sum(p)
    assert counts[p == 0].sum() == 0
    return stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


def test_coins_are_uniform_and_apart_from_the_noise():
    coins = noise.coins(7, np.arange(100_000))
    assert stats.kstest(coins, "uniform").pvalue > 1e-3
    gumbel = noise.gumbel(7, np.arange(100_000), np.array([0, 1, 2]))
    assert all(abs(stats.spearmanr(coins, column).statistic) < 0.01 for column in gumbel.T)


def test_ones_are_exact():
    assert Thresholds().exact
    assert not Thresholds(single=0.9).exact
    assert fits(accepted(Thresholds(), (3, 0)), P)


def test_accumulated_raises_the_chance_of_the_children_together():
    # One child: p / threshold. What is not a child loses in proportion.
    child = 0.12 / 0.5
    rest = (1 - child) / (1 - 0.12)
    assert fits(accepted(Thresholds(accumulated=0.5), (3,)), [*(P[:3] * rest), child, *(P[4:] * rest)])
    # Two: both by the same factor.
    both = P[3] + P[4]
    factor, rest = 1 / 0.25, (1 - both / 0.25) / (1 - both)
    assert fits(accepted(Thresholds(accumulated=0.25), (3, 4)), P * [rest, rest, rest, factor, factor, rest])
    # Their mass is above the threshold: one of them for certain.
    assert fits(accepted(Thresholds(accumulated=0.3), (3, 0)), P * [1, 0, 0, 1, 0, 0])


def test_single_takes_the_likeliest_child_that_is_likely_enough():
    assert fits(accepted(Thresholds(single=0.3), (3, 0)), [P[0] + P[[1, 2, 4, 5]].sum(), 0, 0, P[3], 0, 0])
    assert fits(accepted(Thresholds(single=0.4), (3, 0)), P)
    assert accepted(Thresholds(single=0.0), (3,), 100).tolist() == [0, 0, 0, 100, 0, 0]


def test_impossible_tokens_are_never_accepted():
    draft = siblings(1)
    for thresholds in (Thresholds(single=0.0), Thresholds(accumulated=0.0)):
        assert thresholds.relax(draft, np.array([0, 0]), np.array([0.0]), np.array([0.0, 0.0]))[0] == 0
        assert thresholds.relax(draft, np.array([-1, 0]), np.array([0.5]), np.array([0.0, 0.0]))[0] == -1


@pytest.mark.parametrize(
    "params", [SamplingParams(0.7, seed=3), SamplingParams(1.2, seed=3, top_k=5, top_p=0.8, min_p=0.05)]
)
def test_probabilities_are_those_of_the_oracle(params):
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32) * 3
    rows = row_params.gather([row_params.RowRequest(params, range(4), [[]] * 4)], CPU)
    parents, tokens = np.repeat(np.arange(4), 30), np.tile(np.arange(30), 4)
    reported = sampler.probabilities(
        torch.from_numpy(logits), rows, torch.from_numpy(parents), torch.from_numpy(tokens)
    )
    expected = np.exp(np.stack([filtered_log_probs(row, params) for row in logits]))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(reported.numpy(), expected.reshape(-1), atol=1e-6)


def test_rows_of_a_step_are_relaxed_as_the_oracle_says():
    rng = np.random.default_rng(1)
    thresholds = Thresholds(single=0.3, accumulated=0.4)
    params = [SamplingParams(1.5, seed=1), GREEDY, SamplingParams(0.8, seed=2, top_k=8), SamplingParams(1.0, seed=3)]
    drafts = [siblings(1, 2, 3), siblings(4, 5), siblings(6, 7, 8, 9), siblings()]
    logits = rng.standard_normal((sum(len(d) + 1 for d in drafts), 20)).astype(np.float32) * 2
    requests = [
        row_params.RowRequest(p, [9] + [10] * len(d), [[]] * (len(d) + 1)) for p, d in zip(params, drafts, strict=True)
    ]
    rows = row_params.gather(requests, CPU)
    tokens = sampler.sample(torch.from_numpy(logits), rows)
    works = [SessionWork(None, draft) for draft in drafts]
    changed = 0
    for shift in range(40):  # many positions
        moved = [row_params.RowRequest(r.params, [t + 2 * shift for t in r.positions], r.banned) for r in requests]
        relaxed = relax(thresholds, torch.from_numpy(logits), rows, tokens, works, moved).tolist()
        row = 0
        for request, draft in zip(moved, drafts, strict=True):
            part = slice(row, row + len(draft) + 1)
            expected = tokens[part].tolist()
            if not request.params.greedy and len(draft):
                log_p = filtered_log_probs(logits[row], request.params)
                p = (np.exp(log_p) / np.exp(log_p).sum())[draft.tokens]
                coins = noise.coins(request.params.seed, np.array(request.positions))
                expected = thresholds.relax(draft, np.array(expected), p, coins).tolist()
            assert relaxed[part] == expected
            changed += relaxed[part] != tokens[part].tolist()
            row += len(draft) + 1
    assert changed > 10


# --- in the engine ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("llama"), seed=3))


def proposals_of(seed):
    rng = np.random.default_rng(seed)

    def proposals(session_id, path):
        return [random_tree(rng, session_id, path, 40, 7)]

    return proposals


def test_greedy_text_and_text_without_proposals_are_unchanged(model):
    lossy = {"speculative_accept_threshold_single": 0.0, "speculative_accept_threshold_acc": 0.1}
    greedy = [opening(i, [5, i], GREEDY, max_tokens=20) for i in range(3)]
    assert run(engine_of(model, **lossy), greedy, proposals_of(0)).new == run(engine_of(model), greedy).new
    sampled = [opening(i, [5, i], SamplingParams(1.0, seed=i), max_tokens=20) for i in range(3)]
    assert run(engine_of(model, **lossy), sampled).new == run(engine_of(model), sampled).new


def test_sampled_text_accepts_more_draft_tokens(model, caplog):
    requests = [opening(i, [5, i], SamplingParams(1.0, seed=i), max_tokens=40, logprobs=1) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        exact = run(engine_of(model), requests, proposals_of(0))
        assert not caplog.records
        lossy = run(engine_of(model, speculative_accept_threshold_acc=0.01), requests, proposals_of(0))
    assert "change sampled text" in caplog.text
    assert exact.new == run(engine_of(model), requests).new
    assert lossy.accepted > exact.accepted + 10
    assert all(len(tokens) == 40 for tokens in lossy.new.values())
    # What is reported is reported of the tokens that were committed.
    tokens = [*requests[0].tokens.tolist(), *lossy.new[0]]
    scored = run(engine_of(model), [opening(9, tokens, max_tokens=1, prompt_logprobs=0)]).commits[9][0].prompt_logprobs
    reported = np.concatenate([commit.logprobs.values for commit in lossy.commits[0]])
    np.testing.assert_allclose(reported, scored.values[1:], atol=2e-5)


def test_sampled_text_without_proposals_is_unchanged_with_coalescing(model):
    lossy = {"speculative_accept_threshold_single": 0.9, "coalesce_seconds": 60.0}
    requests = [opening(i, [5, i], SamplingParams(1.0, seed=i), max_tokens=20) for i in range(3)]
    assert run(engine_of(model, **lossy), requests).new == run(engine_of(model), requests).new


def test_a_chain_of_certain_tokens_is_accepted_at_once(model):
    request = opening(1, [5, 6], SamplingParams(1.0, seed=1), max_tokens=8)
    result = run(
        engine_of(model, speculative_accept_threshold_single=0.0), [request],
        lambda i, path: [chain(i, path, [7, 8, 9])] if len(path) == 2 else [],
    )  # fmt: skip
    assert result.new[1][:3] == [7, 8, 9]


@pytest.mark.parametrize("name", ["speculative_accept_threshold_single", "speculative_accept_threshold_acc"])
def test_values_that_are_no_probabilities_are_refused(model, name):
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            engine_of(model, **{name: value})


def test_a_coin_at_the_edge_takes_a_possible_child():
    """Shares of float32 are added up in another order than their sum, which may be a rounding more."""
    rng, thresholds = np.random.default_rng(0), Thresholds(1.0, 0.5)
    for _ in range(2000):
        p = np.append(rng.dirichlet(np.ones(12)) * 0.3, 0.0).astype(np.float32)
        total = float(p.sum())
        extra = (total / 0.5 - total) / (1.0 - total)
        chosen = thresholds._choose(p, extra * (1.0 - 1e-9))
        assert chosen is not None
        assert p[chosen] > 0.0
