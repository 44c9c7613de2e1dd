"""Features from a real target through a real gateway to a draft service whose drafter records them."""

import concurrent.futures

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from outrider.serving.features import FeatureFormat, FeatureSpec, decode
from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway, until
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_model, write_tokenizer

WIDTH, LAYERS = 48, 6
TREE = {"speculative_num_draft_tokens": 8}  # drafting is then never paused, and features are sent after every step


class FedDrafter(NgramDrafter):
    """Proposes as an n-gram table does, and records every row that the target sends."""

    name = "FED"
    features = FeatureSpec((2, 4), final=True, format=FeatureFormat.FLOAT32)

    def __init__(self, fusion=b""):
        super().__init__(NgramOptions())
        self.fusion = fusion
        self.seen = {}

    def open(self, session):
        self.seen[session.id] = session
        super().open(session)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, seed=3))


@pytest.fixture(scope="module")
def truth(folder):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def rows(tokens):
        with torch.no_grad():
            states = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[2], states[4], states[6]], -1)[0].numpy()

    return rows


@pytest.fixture
def system(folder, tmp_path):
    """Starts a target, a draft service with this drafter, and a gateway between them."""
    running = []

    def start(drafter, **flags):
        target = target_service(folder, f"unix:{tmp_path}/target", **flags).start()
        running.append(target)
        draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
        running.append(draft)
        gateway = Gateway(tmp_path, [target.address], [draft.address]).wait()
        running.append(gateway)
        return target, draft, gateway

    yield start
    for service in reversed(running):
        service.stop()


PROMPTS = ["hello there", "a b a b a b a b a b", "the quick brown fox jumps", "12 12 12", "Zürich", "x", "so so", "end"]


def ask_all(gateway, prompts=PROMPTS, **options):
    def ask(prompt):
        answer = gateway.complete(prompt, ignore_eos=True, return_token_ids=True, **({"max_tokens": 40} | options))
        return answer["choices"][0]["token_ids"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts))


def idle(draft):
    load = draft.engine.load()
    return load.running_sessions == load.waiting_sessions == 0


def check(drafter, count, expected, slack=24):
    """Each session's features are `expected` of its tokens, from the first on, except for the last steps' rows."""
    assert len(drafter.seen) == count
    for session in drafter.seen.values():
        assert session.features.first == 0
        assert session.length - 1 - slack <= len(session.features) < session.length
        rows = decode(session.features.take(), drafter.features.format)
        np.testing.assert_allclose(rows, expected(session.tokens.tolist())[: len(rows)], rtol=5e-3, atol=5e-3)
    drafter.seen.clear()


@pytest.mark.parametrize("chunk", [5, 512])
def test_features_are_the_hidden_states_of_transformers(system, truth, chunk):
    drafter = FedDrafter()
    target, draft, gateway = system(drafter, chunked_prefill_size=chunk, **TREE)
    target.pause = 0.03  # slow enough for proposals to arrive in time
    for prompts in (PROMPTS[:2], PROMPTS):  # a few, then all together; the pages of those few are found in the cache
        texts = ask_all(gateway, prompts, temperature=0)
        assert all(len(text) == 40 for text in texts)
        until(lambda: idle(draft))
        check(drafter, len(prompts), truth)
    until(lambda: ask_all(gateway, temperature=0) and gateway.metric("outrider_accepted_draft_tokens_total") > 0, 60)
    assert gateway.metric("outrider_feature_bytes_total") > 10 * 16 * 3 * WIDTH * 4


def test_the_fusion_crosses_with_the_specification(system, truth):
    """The fusion has several parts, and the features are the plain matrix product."""
    fc = torch.randn(2500, 3 * WIDTH, generator=torch.Generator().manual_seed(0))
    drafter = FedDrafter(save({"fc.weight": fc}))
    assert len(drafter.fusion) > 1 << 20
    target, draft, gateway = system(drafter, **TREE)
    target.pause = 0.05  # the draft keeps up with it
    ask_all(gateway, PROMPTS[:3])
    until(lambda: idle(draft))
    check(drafter, 3, lambda tokens: truth(tokens) @ fc.numpy().T)


def test_a_draft_that_comes_back_is_fed_from_the_beginning(system, truth):
    drafter = FedDrafter()
    target, draft, gateway = system(drafter)
    plain = ask_all(gateway, PROMPTS[:4], max_tokens=400, temperature=1, seed=5)
    until(lambda: idle(draft))
    drafter.seen.clear()

    def fed():
        return len(drafter.seen) == 4 and all(len(s.features) > 40 for s in drafter.seen.values())

    target.pause = 0.03  # the texts must not be over before the draft is back
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        texts = pool.submit(ask_all, gateway, PROMPTS[:4], max_tokens=400, temperature=1, seed=5)
        until(fed)
        draft.stop()
        drafter.seen.clear()
        draft.start()
        until(fed)
        target.pause = 0.0
        assert texts.result(60) == plain
    until(lambda: idle(draft))
    check(drafter, 4, truth, slack=400)
    until(lambda: idle(target))


def test_a_draft_that_asks_for_missing_layers_is_refused(folder, tmp_path):
    drafter = FedDrafter()
    drafter.features = FeatureSpec((LAYERS + 1,))
    target = target_service(folder, f"unix:{tmp_path}/target").start()
    draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
    gateway = Gateway(tmp_path, [target.address], [draft.address], require_draft=True)
    try:
        assert gateway.process.wait(30) == 2
        assert "cannot serve the drafter" in gateway.log.read_text()
    finally:
        for service in (draft, target):
            service.stop()
