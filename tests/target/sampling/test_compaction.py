"""Accepted rows move to where they belong: walked on the device as on the host, and in the cache alike."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.acceptance import accepted_path
from outrider.speculation.sampling import SamplingParams
from services.target.engine.verifier import verify
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.sampling.compaction import Moves, lay_out
from services.target.step.batch import build
from services.target.step.upload import UploadBatch
from tests.support.target.cuda.graphs import history
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.target.works import random_case, random_works
from tests.support.tiny import VOCAB, write_model

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 3, 5), LayerShape(1, 4, 2, shared=True)]


def trees_of(works, batch):
    parcel = UploadBatch()
    trees = lay_out(works, batch, parcel)
    parcel.send(CPU)
    return trees()


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 20))
def test_the_walk_on_the_device_is_that_of_the_host(seed, sessions, most):
    works, drawn, allocator = random_case(np.random.default_rng(seed), sessions, most)
    if not any(len(work.draft) for work in works):
        return
    batch = build(works, CPU)
    tokens = torch.from_numpy(np.concatenate(drawn))
    trees = trees_of(works, batch)
    accepted, moves = trees.accepted(tokens).tolist(), trees.moves(tokens)
    row, host = 0, Moves()
    for i, (work, own) in enumerate(zip(works, drawn, strict=True)):
        path, bonus = accepted_path(work.draft, own)
        size = len(work.draft) + 1
        assert [node for node in range(size - 1) if accepted[row + 1 + node]] == path
        row += size
        slots = work.chunk.session.table.slots(work.chunk.stop, work.chunk.stop + size - 1)
        assert moves[0, i, : len(path)].tolist() == slots[path].tolist()
        assert moves[1, i, : len(path)].tolist() == slots[: len(path)].tolist()
        assert not moves[:, i, len(path) :].any()
        if bonus >= 0:  # where the session does not end, it is what is committed
            assert verify(work.draft, own, frozenset(), len(path) + 1).path == path
        host.add(work.chunk.session, path)
    caches = [KVCache(SHAPES, allocator.total_pages, allocator.page_size, torch.float32, CPU) for _ in range(2)]
    for cache in caches:
        for number, pool in enumerate((*cache.keys, cache.values[0])):
            pool.copy_(torch.arange(pool.numel()).reshape(pool.shape) + number)
    host.make(caches[0], CPU)
    caches[1].move_paths(moves)
    for mine, its in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_engines_that_walk_on_the_device_give_the_same_text(tmp_path, temperature, overlap, monkeypatch):
    model = load_model(write_model(tmp_path))
    requests = [
        opening(i, [5 + i] * (3 + i), SamplingParams(temperature, seed=i), stop_token_ids=(30, 60, 90, 120))
        for i in range(4)
    ]
    expected = run(engine_of(model), requests)
    text = {r.session_id: r.tokens.tolist() + expected.new[r.session_id] for r in requests}
    rng = np.random.default_rng(0)

    def proposals(session_id, path):
        """The right path, behind wrong siblings that seem likelier."""
        ahead = text[session_id][len(path) : len(path) + int(rng.integers(0, 6))]
        wrong = [chain(session_id, path, [*ahead[:i], int(rng.integers(3, VOCAB))], -0.01) for i in range(len(ahead))]
        return [*wrong, chain(session_id, path, ahead)]

    engine = engine_of(model, page_size=2, speculative_num_draft_tokens=12)
    drawing = engine.launcher.sampler
    engine.overlap, drawing.walks, drawing.alongside = overlap, True, False

    def nothing(self, session, path):
        assert not path, "the host has nothing to say"

    monkeypatch.setattr(Moves, "add", nothing)
    found = run(engine, requests, proposals)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert found.accepted > 40


@torch.inference_mode()
def test_moves_can_be_repeated_in_another_cache():
    caches = [history(random_works(np.random.default_rng(3), 4, 5)) for _ in range(2)]
    caches[0].on_move = caches[1].repeat
    slots = torch.arange(4, 4 + 12)
    caches[0].move(slots[:3], slots[5:8])
    caches[0].move_paths(torch.stack([slots[8:12].view(2, 2), slots[:4].view(2, 2)]))
    for mine, its in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
        assert torch.equal(mine, its)
    assert not torch.equal(caches[0].keys[0], history(random_works(np.random.default_rng(3), 4, 5)).keys[0])
