"""Transfers between host and device in a step. PyTorch's meta device stands for a GPU.

Meta tensors have no content: an operation that needs it, for which the host would wait for a real device, raises.
Copies between devices are counted.
"""

import time

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.acceptance import Thresholds
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import EMPTY_SLICE, SpeculationTree
from services.target.engine.launching.launch_clock import LaunchClock
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.model.base import Model, Outputs
from services.target.sampling.session import TargetSession
from services.target.sampling.step_sampler import StepSampler
from services.target.step.batch import DeferredRoots, SessionWork, build
from services.target.step.download import Download
from services.target.step.upload import DeviceArrays
from tests.support.target.driving import chain, engine_of, opening, preparing_engine, random_tree

DEVICE = torch.device("meta")
VOCAB = 5000  # more tokens than the sampler sorts at first
SHAPES = (LayerShape(1, 4, 4),)


class Crossings(TorchDispatchMode):
    """Counts copies from host to device, and from device to host, where zeros arrive."""

    def __init__(self):
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if name in ("to", "_to_copy") and args[0].device == DEVICE and kwargs.get("device") == torch.device("cpu"):
            self.down += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = operation(*args, **kwargs)
        if name in ("to", "_to_copy", "copy_"):
            source = args[name == "copy_"]
            self.up += (source.device.type, result.device.type) == ("cpu", "meta")
        return result


class Runner:
    """A model whose logits have no content."""

    def forward(self, batch, cache):
        return Outputs(torch.empty(len(batch.rows.sampled), VOCAB, device=batch.ids.device, dtype=torch.bfloat16))


@pytest.fixture
def crossings():
    with Crossings() as mode:
        yield mode


def model_of():
    return Model(Runner(), DEVICE, torch.bfloat16, torch.bfloat16, "none", VOCAB, 4, 512, (), SHAPES)


def step(params, nodes, **options):
    """A sampler on the meta device, works of some sessions, and the sessions by id."""
    rng = np.random.default_rng(0)
    model = model_of()
    cache = KVCache(SHAPES, 64, 4, torch.bfloat16, DEVICE)
    step_sampler = StepSampler(model, cache, Thresholds())
    prefix = PrefixCache(PageAllocator(64, 4))
    works, entries = [], {}
    for i in range(3):
        request = opening(i, rng.integers(0, 50, 9).tolist(), params, **options)
        session = Session(request, prefix)
        entries[i] = TargetSession.of(request, session, frozenset({7}), model.vocab_size)
        tree = SpeculationTree(request.tokens)
        tree.merge(random_tree(rng, i, request.tokens.tolist(), 5, 12))
        draft = tree.select(nodes) if nodes else EMPTY_SLICE
        session.table.reserve(session.length + len(draft))
        works.append(SessionWork(Chunk(session, session.length - 1, session.length), draft))
    return step_sampler, works, entries


def launch(step_sampler, works, entries):
    batch = build(works, DEVICE)
    return step_sampler.sample(batch, Runner().forward(batch, None), works, entries)


SAMPLING = {
    "greedy": SamplingParams(0.0),
    "sampled": SamplingParams(1.0),
    "filtered": SamplingParams(0.8, top_p=0.9, min_p=0.1),
    "penalised": SamplingParams(0.8, top_k=9, frequency_penalty=0.5, logit_bias=((3, 1.0),)),
}


@pytest.mark.parametrize("nodes", [0, 8])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_step_has_two_uploads_and_one_download(crossings, name, nodes):
    """Uploads: the batch before the forward pass, sampling arrays during it. Download: the samples."""
    step_sampler, works, entries = step(SAMPLING[name], nodes, min_tokens=3)
    crossings.up = crossings.down = 0
    launched = launch(step_sampler, works, entries)
    assert (crossings.up, crossings.down) == (2, 1)
    assert launched.moved == (nodes > 0 and name != "filtered")
    assert not launched.read().tokens.any()
    assert (crossings.up, crossings.down) == (2, 1)


def test_a_greedy_step_has_one_upload(crossings):
    step_sampler, works, entries = step(SAMPLING["greedy"], 0)
    crossings.up = crossings.down = 0
    launch(step_sampler, works, entries)
    assert (crossings.up, crossings.down) == (1, 1)


def test_overlap_launches_a_step_before_the_last_is_read(crossings, monkeypatch):
    """With overlap, each step uploads its batch and downloads the samples of the step before."""
    events = []
    forward, read = Runner.forward, Download.read
    monkeypatch.setattr(Runner, "forward", lambda *arguments: events.append("launch") or forward(*arguments))
    monkeypatch.setattr(Download, "read", lambda self: events.append("read") or read(self))
    engine = engine_of(model_of(), max_running_requests=4)
    engine.overlap = True
    for i in range(4):
        engine.open(opening(i, [5, 6, 7 + i], SAMPLING["sampled"], max_tokens=20))
    counts, commits = [], 0
    while not engine.idle:
        crossings.up = crossings.down = 0
        commits += len(engine.step().commits)
        counts.append((crossings.up, crossings.down))
    assert commits == 4 * 20
    assert events == ["launch", *["launch", "read"] * 19, "read"]
    assert counts == [(2, 1)] * 20 + [(0, 0)]


def test_a_prepared_step_is_launched_before_the_last_is_read(crossings, monkeypatch):
    """Its uploads: the batch, the trees and keys that the device chooses from, and sampling arrays."""
    events = []
    forward, read = Runner.forward, Download.read
    monkeypatch.setattr(Runner, "forward", lambda *arguments: events.append("launch") or forward(*arguments))
    monkeypatch.setattr(Download, "read", lambda self: events.append("read") or read(self))
    monkeypatch.setattr(LaunchClock, "due", lambda *_: time.perf_counter() + 5.0)  # proposals may arrive until then
    engine = preparing_engine(model_of(), max_running_requests=4)
    texts = {i: [5, 6, 7 + i] for i in range(4)}
    for i, text in texts.items():
        engine.open(opening(i, text, SAMPLING["sampled"], max_tokens=20))
    counts, waits, accepted = [], [], 0
    while not engine.idle:
        for i, text in texts.items():
            engine.receive([chain(i, text, [0] * 40)], ())  # what arrives from this device is zeros
        crossings.up = crossings.down = 0
        for commit in engine.step().commits:
            texts[commit.session_id] += commit.tokens.tolist()
            accepted += commit.accepted
        counts.append((crossings.up, crossings.down))
        waits.append(engine.draft_wait > 4.0)
    assert accepted > 30
    assert waits[0]
    assert not waits[-1]
    steps = len(counts) - 1
    assert events == ["launch", *["launch", "read"] * (steps - 1), "read"]
    assert engine.prepared == steps - 1
    assert set(counts[1:-1]) == {(3, 1)}


def test_log_probabilities_need_no_further_download(crossings):
    step_sampler, works, entries = step(SAMPLING["sampled"], 8, logprobs=3)
    crossings.up = crossings.down = 0
    launch(step_sampler, works, entries)
    assert (crossings.up, crossings.down) == (3, 1)


def test_deferred_roots_need_no_upload_if_consecutive(crossings):
    step_sampler, works, entries = step(SAMPLING["sampled"], 0)
    launched = launch(step_sampler, works, entries)
    crossings.up = crossings.down = 0
    ids = torch.empty(8, dtype=torch.int64, device=DEVICE)
    DeferredRoots(np.arange(1, 4), np.arange(3), launched.tokens).put(ids)
    assert (crossings.up, crossings.down) == (0, 0)
    DeferredRoots(np.array([1, 5]), np.array([2, 0]), launched.tokens).put(ids)
    assert (crossings.up, crossings.down) == (1, 0)


def test_arrays_of_a_captured_step_are_one_upload(crossings):
    arrays = [np.zeros(9, np.int64), np.zeros((4, 3), np.int32), np.zeros(100, np.int32)]
    slab = DeviceArrays(arrays, DEVICE)
    crossings.up = 0
    slab.fill([arrays[0][:3], arrays[1][:1], arrays[2][:70]])
    assert crossings.up == 1


def test_a_wait_for_the_device_raises(crossings):
    with pytest.raises(RuntimeError, match="on meta tensors"):
        bool(torch.empty(3, device=DEVICE).any())
