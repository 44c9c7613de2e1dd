"""The gateway's self-test of a drafter through real services: a head that fits, and one with permuted tokens."""

import re

import numpy as np
import pytest
import safetensors.numpy

from outrider.config import DraftConfig
from services.draft.process.app import build
from tests.support.checkpoints.perfect import write_cyclic_target, write_perfect_eagle3
from tests.support.gateway.services import Gateway, until
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, a head that predicts it, and the same head with a wrong `d2t`."""
    base = tmp_path_factory.mktemp("models")
    target = write_tokenizer(write_cyclic_target(base / "target"))
    write_perfect_eagle3(base / "right", target)
    tensors = safetensors.numpy.load_file(write_perfect_eagle3(base / "wrong", target) / "model.safetensors")
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 7, axis=0)
    safetensors.numpy.save_file(tensors, base / "wrong" / "model.safetensors", {"format": "pt"})
    return base


@pytest.fixture
def target(base, tmp_path):
    """Each pair has a new target, which has not yet measured whether speculation is profitable."""
    service = target_service(base / "target", f"unix:{tmp_path}/target", speculative_num_draft_tokens=8).start()
    yield service
    service.stop()


def head(base, name):
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(base / name), model_path=str(base / "target"),
        max_running_requests=1, draft_max_total_tokens=2048,
    )  # fmt: skip
    drafter = build(config)[0].drafter
    drafter.warm_up()
    return drafter


@pytest.mark.parametrize("name", ["right", "wrong"])
def test_a_pair_is_judged_once_at_start_up(base, target, tmp_path, name):
    draft = draft_service(f"unix:{tmp_path}/draft", head(base, name)).start()
    gateway = Gateway(tmp_path, [target.address], [draft.address], self_test=True).wait()
    try:
        until(lambda: re.search(r"self-test of the draft.*\n", gateway.log.read_text()), 60)
        logged = gateway.log.read_text()
        warned = "does not seem to fit the target" in logged
        assert warned == (name == "wrong"), logged
        assert ("EAGLE3 predicted 0 of the" in logged) == warned
        assert ("d2t" in logged) == warned
        assert ("the target accepted" in logged) != ("the target verified no draft tokens" in logged)
        for metric in ("generated_tokens_total", "verification_steps_total", "prompt_tokens_total", "requests_total"):
            assert gateway.metric(f"outrider_{metric}") == 0
        until(lambda: target.engine.load().running_sessions == draft.engine.load().running_sessions == 0)
        gateway.text("hello", max_tokens=4)
        assert gateway.metric("outrider_generated_tokens_total") == 4
        draft.stop()
        until(lambda: gateway.metric("outrider_service_up", service="draft") == 0)
        draft.start()
        until(lambda: gateway.metric("outrider_service_up", service="draft") == 1)
        gateway.text("hello", max_tokens=4)
        assert gateway.log.read_text().count("self-test of") == 1
    finally:
        for service in (gateway, draft):
            service.stop()
