"""Weights of the target that a draft shares, replaced from a folder or by tensors that arrive while it serves."""

import logging
import re
import shutil
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from outrider.errors import ConfigError
from outrider.wire.v1 import draft_pb2
from services.draft.drafters.shared_weights import ArrivingTensors
from services.draft.process.service import DraftServicer
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.features import PROMPT, feed, start
from tests.support.draft.helpers import feature_engine, settle
from tests.support.draft.online import online_engine, write_pair
from tests.support.draft.token_maps import IDS, write_map
from tests.support.tiny import write_model

HEADS = {
    "EAGLE": (eagle, {}),
    "EAGLE in 8 bits": (eagle, {"speculative_draft_model_quantization": "int8"}),
    "EAGLE3": (eagle3, {}),
    "MTP": (None, {}),
    "its own MTP": (None, {}),
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
        head = target if kind == "its own MTP" else shutil.copytree(target, tmp_path / "head")
    else:
        target = write_model(tmp_path / "target")
        head = write_head(tmp_path / "head", *write(target))
    algorithm = "NEXTN" if write is None else kind.split()[0]
    own = head == target
    return target, lambda folder, **more: feature_engine(algorithm, folder if own else head, folder, **(flags | more))


def params_of(engine):
    return engine.drafter.runner.params


def same(one, other):
    leaves, form = jax.tree.flatten(one)
    others, others_form = jax.tree.flatten(other)
    return form == others_form and all(
        a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(a, b)
        for a, b in zip(leaves, others, strict=True)
    )


def sent(shared, folder, names=None):
    """Tensors of a folder as they arrive in parts."""
    tensors = load_file(folder / "model.safetensors")
    content = save({name: tensors[name] for name in shared.shapes if names is None or name in names})
    arriving = ArrivingTensors(shared.shapes)
    for place in range(0, len(content), 1000):
        arriving.add(content[place : place + 1000])
    return arriving.finish()


@pytest.mark.parametrize("kind", HEADS)
def test_tensors_that_arrive_equal_those_of_a_folder(tmp_path, kind):
    """Also after others: those that do not come again are those of the start."""
    target, make = pair(tmp_path, kind)
    engine, later = make(target), trained(target, tmp_path / "later")
    shared, first = engine.drafter.shared_weights, params_of(engine)
    assert len(shared.shapes) == {"EAGLE3": 1, "its own MTP": 18}.get(kind, 2)
    shared.install(shared.take(sent(shared, later), "later"))
    fresh = make(later)
    assert shared.fingerprint == "later"
    assert same(params_of(engine), params_of(fresh))
    shared.install(shared.take(sent(shared, later, ["model.embed_tokens.weight"]), "embedding"))
    assert not same(params_of(engine), params_of(fresh)) or kind == "EAGLE3"
    assert not same(params_of(engine), first)
    shared.install(shared.load(str(target)))
    assert same(params_of(engine), first)


@pytest.mark.sampled(2)
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


class Context:
    """Of a call that fails."""

    async def send_initial_metadata(self, _):
        pass

    async def abort(self, code, details, metadata):
        raise ConfigError(details)


class Loop:
    """Does work at once."""

    def call(self, work):
        done = Future()
        done.set_result(work())
        return done


async def test_service_reloads_weights_and_survives_failures(tmp_path, caplog):
    async def flush(folder, wanted=""):
        asked = draft_pb2.FlushDraftRequest(only_fed=True, target_folder=str(folder), shared_fingerprint=wanted)
        return (await servicer.FlushDraft(asked, None)).wants_tensors

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
    assert not await flush("", engine.drafter.shared_weights.fingerprint)
    assert await flush(later, "another"), "the folder was written anew"
    assert await flush("", "another")


async def test_half_an_update_leaves_the_old_weights(tmp_path):
    target, make = pair(tmp_path, "EAGLE")
    engine, later = make(target), trained(target, tmp_path / "later")
    servicer, shared, before = DraftServicer(None, Loop()), engine.drafter.shared_weights, params_of(engine)
    servicer.serve(draft_pb2.GetDraftInfoResponse(), engine)
    tensors = load_file(later / "model.safetensors")

    async def update(content, fingerprint="two"):
        async def parts():
            yield draft_pb2.UpdateSharedWeightsRequest(fingerprint=fingerprint, content=content[:50])
            yield draft_pb2.UpdateSharedWeightsRequest(content=content[50:])

        await servicer.UpdateSharedWeights(parts(), Context())

    whole = save({name: tensors[name] for name in shared.shapes})
    embedding = tensors["model.embed_tokens.weight"]
    for content, words in (
        (whole[:-3], "less data was sent"),
        (whole + b"x", "more data was sent"),
        (whole[:20], "less data was sent"),
        (b"\xff" * 60, "no shared tensors"),
        (save({"model.norm.weight": tensors["model.norm.weight"]}), "shares no tensors of these names"),
        (save({"model.embed_tokens.weight": embedding[:7]}), "shape [7"),
        (save({"model.embed_tokens.weight": embedding.astype(np.int32)}), "type I32"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            await update(content)
    assert params_of(engine) is before
    assert shared.fingerprint != "two"
    await update(whole)
    assert same(params_of(engine), params_of(make(later)))
    await update(b"", "two")  # it has these


def test_a_head_that_learns_follows_its_target(tmp_path):
    """Served and trained: the next weights that it learns are converted with the target's new ones."""
    target, head = write_pair(tmp_path)
    engine, later = online_engine(head, target), trained(target, tmp_path / "later")
    drafter, learner = engine.drafter, engine.drafter.learner
    shared, first, weights = drafter.shared_weights, params_of(engine), learner.trainer.target
    arrived = sent(shared, later)
    shared.install(shared.take(arrived, "later"))
    fresh = online_engine(head, later)
    assert same(params_of(engine)["embed"], params_of(fresh)["embed"])
    assert not same(params_of(engine)["embed"], first["embed"])
    assert same(params_of(engine)["layers"], first["layers"])
    for target_weights in (learner.trainer.target, learner.serving.target, learner.judge.first.target):
        assert same(target_weights, fresh.drafter.learner.trainer.target)
        assert not same(target_weights.head, weights.head)
    learner.swap(learner.judge.between(learner.serving, 1.0))
    drafter.work()
    assert same(params_of(engine)["embed"], params_of(fresh)["embed"])
