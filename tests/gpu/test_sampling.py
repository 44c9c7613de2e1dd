"""Penalties, masks, log-probabilities and thresholds on a GPU: what they are on the CPU. Run by `make gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.sampling import SamplingParams, logprobs
from services.target.process.warmup import warm_up
from services.target.sampling import logprobs as device_logprobs
from services.target.sampling import masks, penalties, row_params, sampler
from services.target.sampling.penalties import PenaltyCounts
from services.target.sampling.row_params import RowRequest
from services.target.step.download import Download
from tests.support.invariance.engines import target_engine
from tests.support.invariance.pair import GarbageDraft, Pair, request
from tests.support.target.works import repetitive_slice
from tests.support.tiny import VOCAB, write_model, write_tokenizer

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CPU = torch.device("cpu")
PARAMS = SamplingParams(
    0.8, top_k=50, top_p=0.9, seed=3, presence_penalty=0.5, frequency_penalty=-0.7, repetition_penalty=1.3,
    logit_bias=((5, 3.0), (900, -100.0)),
)  # fmt: skip


def test_rows_are_adjusted_and_sampled_as_on_the_cpu():
    rng = np.random.default_rng(0)
    vocab, draft = 1003, repetitive_slice(rng, 6)
    logits = torch.from_numpy(rng.standard_normal((7, vocab)).astype(np.float32) * 3)
    tally = PenaltyCounts(PARAMS, rng.integers(0, 20, 40), 25)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, -(-vocab // 32))).astype(np.int32))
    parents, tokens = torch.arange(6), torch.from_numpy(draft.tokens.astype(np.int64))
    results = []
    for device in (CPU, torch.device("cuda")):
        adjustments = penalties.gather([(0, tally, draft)], device)
        mask = masks.Mask(torch.tensor([0, 2, 5], device=device), words.to(device))
        rows = row_params.gather([RowRequest(PARAMS, range(7), [[7], *[[]] * 6])], device)
        adjusted = sampler.adjusted(logits.to(device), (rows.banned_rows, rows.banned_tokens), adjustments, mask)
        probabilities = sampler.probabilities(adjusted, rows, parents.to(device), tokens.to(device))
        results.append((adjusted.cpu(), sampler.sample_adjusted(adjusted, rows).cpu(), probabilities.cpu()))
    (adjusted, drawn, probable), (adjusted_there, drawn_there, probable_there) = results
    assert torch.equal(adjusted, adjusted_there)
    assert drawn.tolist() == drawn_there.tolist()
    torch.testing.assert_close(probable, probable_there)


def test_scores_are_those_of_the_oracle():
    logits = np.random.default_rng(0).standard_normal((9, 700)).astype(np.float32) * 4
    tokens = np.random.default_rng(1).integers(0, 700, 9)
    there = torch.from_numpy(logits).cuda()
    scores = device_logprobs.score(there, torch.arange(9).cuda(), torch.from_numpy(tokens).cuda(), 5)
    reported, expected = (
        device_logprobs.Scores(*Download(scores).read()).logprobs(0, slice(0, 9), 5),
        logprobs(logits, tokens, 0, 5),
    )
    np.testing.assert_allclose(reported.values, expected.values, atol=2e-5)
    np.testing.assert_array_equal(reported.top_tokens, expected.top_tokens)


@pytest.mark.parametrize("eager", [True, False])
def test_constrained_text_does_not_depend_on_proposals(tmp_path, eager):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_tokenizer(write_model(tmp_path, seed=1))
    engine = target_engine(folder, device="cuda", disable_cuda_graph=eager)
    warm_up(engine)
    grammars = [Grammar(GrammarKind.REGEX, "([a-d]{2,5}-)*[xyz]{1,3}!"), None]
    todo = [
        replace(one, grammar=grammars[i % 2], logprobs=2, prompt_logprobs=1)
        for i, one in enumerate(request(i, [5, 6, 7 + i], 1.0, 40, frequency_penalty=0.6) for i in range(4))
    ]
    alone = {i: Pair(engine).run([one]).tokens[i] for i, one in enumerate(todo)}
    assert Pair(engine, lambda: GarbageDraft(VOCAB)).run(todo).tokens == alone
