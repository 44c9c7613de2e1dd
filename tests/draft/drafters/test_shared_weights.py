"""The target's embedding and head, loaded from another folder while a head serves."""

import logging
import shutil
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outrider.errors import ConfigError
from outrider.wire.v1 import draft_pb2
from services.draft.process.service import DraftServicer
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.features import PROMPT, feed, start
from tests.support.draft.helpers import feature_engine, settle
from tests.support.draft.token_maps import IDS, write_map
from tests.support.tiny import write_model

HEADS = {
    "EAGLE": (eagle, {}),
    "EAGLE in 8 bits": (eagle, {"speculative_draft_model_quantization": "int8"}),
    "EAGLE3": (eagle3, {}),
    "MTP": (None, {}),
}


def trained(folder, place):
    """A checkpoint with other weights."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    changed = {
        name: tensor + tensor.dtype.type(0.01) if tensor.dtype.kind == "f" else tensor
        for name, tensor in tensors.items()
    }
    save_file(changed, place / "model.safetensors", {"format": "pt"})
    return place


def pair(tmp_path, kind):
    """An engine for the target's first weights, and a function that makes engines for other folders."""
    write, flags = HEADS[kind]
    if write is None:
        target = write_mtp(tmp_path / "target", "mimo")
        head = shutil.copytree(target, tmp_path / "head")
    else:
        target = write_model(tmp_path / "target")
        head = write_head(tmp_path / "head", *write(target))
    algorithm = "NEXTN" if write is None else kind.split()[0]
    return target, lambda folder, **more: feature_engine(algorithm, head, folder, **(flags | more))


def params_of(engine):
    return engine.drafter.runner.params


def same(one, other):
    leaves, form = jax.tree.flatten(one)
    others, others_form = jax.tree.flatten(other)
    return form == others_form and all(
        a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(a, b)
        for a, b in zip(leaves, others, strict=True)
    )


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_reloaded_weights_equal_initial_ones(tmp_path, kind, mapped):
    target, make = pair(tmp_path, kind)
    more = {"speculative_token_map": write_map(tmp_path, IDS)} if mapped else {}
    engine, later = make(target, **more), trained(target, tmp_path / "later")
    assert not same(params_of(engine), params_of(make(later, **more)))
    shared_weights = engine.drafter.shared_weights
    shared_weights.install(shared_weights.load(str(later)))
    assert same(params_of(engine), params_of(make(later, **more)))
    assert shared_weights.load(str(later)) is None
    assert shared_weights.load(str(target)) is not None


def test_reload_keeps_programs_and_drops_prefixes(tmp_path):
    target, make = pair(tmp_path, "EAGLE")
    engine = make(target, draft_page_size=4)
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    start(engine, PROMPT)
    feed(engine, 0, 20)
    settle(engine)
    engine.close(1)
    assert len(engine.drafter.prefix) > 0
    shared_weights = engine.drafter.shared_weights
    shared_weights.install(shared_weights.load(str(trained(target, tmp_path / "later"))))
    assert len(engine.drafter.prefix) == 0
    start(engine, PROMPT)
    feed(engine, 0, 20)
    settle(engine)
    engine.check()
    assert engine.drafter.runner.compilations.total == compiled


def test_a_head_with_its_own_shares_nothing(tmp_path):
    target = write_model(tmp_path / "target")
    head = write_head(tmp_path / "head", *eagle3(target, hidden=32))
    assert feature_engine("EAGLE3", head, target).drafter.shared_weights is None


async def test_service_reloads_weights_and_survives_failures(tmp_path, caplog):
    class Loop:
        def call(self, work):
            done = Future()
            done.set_result(work())
            return done

    async def flush(folder):
        await servicer.FlushDraft(draft_pb2.FlushDraftRequest(only_fed=True, target_folder=str(folder)), None)

    target, make = pair(tmp_path, "EAGLE")
    engine, later = make(target), trained(target, tmp_path / "later")
    servicer = DraftServicer(None, Loop())
    servicer.serve(draft_pb2.GetDraftInfoResponse(), engine)
    await flush(later)
    taken = params_of(engine)
    assert same(taken, params_of(make(later)))
    other = write_model(tmp_path / "other", vocab=100)
    with caplog.at_level(logging.WARNING):
        for folder in ("/no/such/folder", other, "", later):
            await flush(folder)
    assert params_of(engine) is taken
    assert len(caplog.messages) == 2
    with pytest.raises(ConfigError):
        engine.drafter.shared_weights.load(str(other))
