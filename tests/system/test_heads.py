"""Heads behind a real gateway: draft tokens are accepted, and a restarted draft service catches up."""

import concurrent.futures
import time

import pytest

from outrider.config import DraftConfig
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from services.draft.drafters.feature import FeatureDrafter
from services.draft.process.app import build
from tests.support.checkpoints.perfect import write_cyclic_target, write_perfect_eagle3
from tests.support.gateway.services import Gateway, until
from tests.support.system.heads import PROMPTS, VERIFY_ALL, accepted, ask_all
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and a head that predicts its text."""
    base = tmp_path_factory.mktemp("models")
    target = write_tokenizer(write_cyclic_target(base / "target"))
    write_perfect_eagle3(base / "EAGLE3", target)
    return base


_REST = 0.01  # seconds after each step of the target, so that proposals arrive in time


@pytest.fixture
def system(models, tmp_path):
    """Target, draft service and gateway; each start has a new drafter with the same compiled programs."""
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(models / "EAGLE3"),
        model_path=str(models / "target"), max_running_requests=4, draft_max_total_tokens=4096,
    )  # fmt: skip
    first = build(config)[0].drafter
    first.warm_up()

    def drafter():
        prefix = PrefixCache(PageAllocator(first.prefix.allocator.total_pages, 16))
        return FeatureDrafter("EAGLE3", first.runner, prefix, 4, 64, first.features, first.fusion)

    target = target_service(models / "target", f"unix:{tmp_path}/target", chunked_prefill_size=5, **VERIFY_ALL).start()
    target.pause = _REST
    draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
    gateway = Gateway(tmp_path, [target.address], [draft.address]).wait()
    yield target, draft, gateway
    for service in (gateway, draft, target):
        service.stop()


def test_draft_tokens_of_heads_are_accepted_and_heads_catch_up(system):
    target, draft, gateway = system
    texts = ask_all(gateway, max_tokens=120, temperature=1, seed=3)

    def believed():  # on a busy machine not at once, because late proposals are not verified
        before = accepted(gateway)
        assert ask_all(gateway, max_tokens=120, temperature=1, seed=3) == texts
        return accepted(gateway) - before > 0.5 * 120 * len(PROMPTS)

    until(believed, 60)
    assert accepted(gateway) > 0.9 * gateway.metric("outrider_verified_draft_tokens_total")
    draft.stop()
    target.pause = 0.05  # the texts must not be over before the draft has caught up
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, gateway, max_tokens=450, temperature=1, seed=3)
        time.sleep(0.5)
        before = accepted(gateway)
        assert not answers.done()
        draft.start()
        until(lambda: accepted(gateway) > before + 100, 60)
        target.pause = _REST
        assert [text[:120] for text in answers.result(60)] == texts
    until(lambda: draft.engine.load().running_sessions == 0)
    draft.engine.check()


def test_text_goes_on_where_a_head_s_context_ends(models, tmp_path):
    """Heads often have 2,048 positions, their targets many more."""
    context = 64
    folder = tmp_path / "head"
    write_perfect_eagle3(folder, models / "target", max_position_embeddings=context)
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(folder), model_path=str(models / "target"),
        max_running_requests=1, draft_max_total_tokens=2048,  # few shapes to compile
    )  # fmt: skip
    drafter = build(config)[0].drafter
    drafter.warm_up()
    target = target_service(models / "target", f"unix:{tmp_path}/target", **VERIFY_ALL).start()
    alone = Gateway(tmp_path, [target.address]).wait()
    try:
        texts = ask_all(alone, max_tokens=200)
    finally:
        alone.stop()
    target.pause = _REST
    draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
    gateway = Gateway(tmp_path, [target.address], [draft.address]).wait()
    try:
        rounds = 0

        def believed():  # on a busy machine not at once
            nonlocal rounds
            rounds += 1
            assert ask_all(gateway, max_tokens=200) == texts
            return accepted(gateway) > 0.3 * context

        until(believed, 60)
        before = accepted(gateway)
        assert before < rounds * context * len(PROMPTS)
        gateway.complete("a" * context, max_tokens=20, ignore_eos=True)
        assert accepted(gateway) == before  # no drafter works for this session
        until(lambda: draft.engine.load().running_sessions == 0)
        assert gateway.client.get("/health").status_code == 200
    finally:
        for service in (gateway, draft, target):
            service.stop()
