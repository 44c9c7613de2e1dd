"""Compiled programs: the logits of the modules that they are built from, and batch invariance."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from outrider import native
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.kernels.cpu import library
from services.target.kernels.kv_cache import KVCache
from services.target.model.loading import weight_quantization
from services.target.model.loading.load import load
from services.target.model.modules import ModuleRunner
from services.target.model.native import ProgramRunner
from services.target.step.batch import SessionWork, build
from tests.support.target.decoders import MODELS, written
from tests.support.target.driving import chain, engine_of, load_model, load_modules, opening, random_tree, run
from tests.support.target.works import random_slice, shuffled_allocator
from tests.support.tiny import VOCAB, write_model

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
CPU = torch.device("cpu")


class Sessions:
    """Sessions of random tokens on pages of their own, whose caches a runner fills."""

    def __init__(self, model, lengths, page_size=16, seed=0):
        rng = np.random.default_rng(seed)
        pages = sum(length // page_size + 8 for length in lengths) + 64
        allocator = shuffled_allocator(rng, pages, page_size)
        self.model = model
        self.cache = KVCache(model.shapes, allocator.total_pages, page_size, model.cache_dtype, CPU)
        self.sessions = [
            Session(opening(i, rng.integers(0, VOCAB, length).tolist()), PrefixCache(allocator))
            for i, length in enumerate(lengths)
        ]
        for session in self.sessions:
            session.table.reserve(session.length + 40)

    def logits(self, *works):
        """Logits of (session, start, stop[, draft]) in one step."""
        made = [
            SessionWork(Chunk(self.sessions[i], start, stop), draft[0] if draft else EMPTY_SLICE)
            for i, start, stop, *draft in works
        ]
        with torch.inference_mode():
            return self.model.runner.forward(build(made, CPU), self.cache).logits


def test_more_threads_than_cores_give_the_same_text(tmp_path):
    """They wait for one another asleep, and are woken."""
    folder = written(tmp_path, next(iter(MODELS)))
    requests = [opening(i, list(range(5, 40 + i)), max_tokens=60) for i in (1, 2)]
    few = run(engine_of(load_model(folder)), requests)
    torch.set_num_threads(3 * (os.cpu_count() or 1) + 1)
    crowd = load_model(folder)
    assert crowd.runner.threads > 3
    assert run(engine_of(crowd), requests).new == few.new


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_modules(name, tmp_path):
    folder = written(tmp_path, name)
    program, modules = load_model(folder), load_modules(folder)
    assert isinstance(program.runner, ProgramRunner)
    assert isinstance(modules.runner, ModuleRunner)
    rng = np.random.default_rng(1)
    drafts = [random_slice(rng, size) for size in (7, 1, 20)]
    message = []
    for model in (program, modules):
        sessions = Sessions(model, (33, 70, 6))
        parts = [
            sessions.logits((0, 0, 33), (1, 0, 41)),
            sessions.logits((1, 41, 69), (2, 0, 5)),
            sessions.logits((0, 32, 33, drafts[0]), (1, 69, 70, drafts[2]), (2, 5, 6, drafts[1])),
        ]
        message.append(torch.cat(parts))
    torch.testing.assert_close(message[0], message[1], rtol=1e-3, atol=1e-3)
    assert message[0].std() > 0.1, "flat logits prove little"


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"},
                                   {"dtype": "bfloat16", "quantization": "int8"}])  # fmt: skip
def test_a_rows_bits_do_not_depend_on_the_batch(flags, tmp_path):
    model = load_model(write_model(tmp_path, max_position_embeddings=2048), **flags)
    length = 300  # more than two splits of 128 keys
    alone = Sessions(model, (length,))
    plain = []
    for token in range(length):
        alone.sessions[0].length = token + 1  # so that its logits are wanted
        plain.append(alone.logits((0, token, token + 1)))
    # In pieces, beside other prompts, and as a draft that turns out right.
    batched = Sessions(model, (length, 50, 200))
    batched.sessions[0]._tokens[:length] = alone.sessions[0].tokens
    batched.sessions[0].length = 280
    batched.logits((1, 0, 50), (0, 0, 77))
    batched.logits((0, 77, 250), (2, 0, 100))
    depths = np.arange(1, 20, dtype=np.int32)
    draft = TreeSlice(alone.sessions[0].tokens[280:299].copy(), depths - 2, depths, np.zeros(19, np.float32))
    rows = batched.logits((0, 250, 280, draft), (2, 100, 180))
    for i in range(20):
        assert torch.equal(rows[i], plain[279 + i][0]), i


@pytest.mark.parametrize("flags", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"},
                                   {"quantization": "int4"}])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_quantized_text_does_not_depend_on_proposals_or_the_batch(flags, temperature, tmp_path):
    model = load_model(write_model(tmp_path), **flags)
    prompts = [list(range(3 + i, 40 + 2 * i)) for i in range(6)]
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(6)]
    alone = [run(engine_of(model), [opening(i, prompts[i], params[i])]).new[i] for i in range(6)]
    rng = np.random.default_rng(0)

    def proposals(session_id, path):
        done = len(path) - len(prompts[session_id])
        right = chain(session_id, path, alone[session_id][done : done + int(rng.integers(0, 9))])
        return [random_tree(rng, session_id, path, VOCAB, 6), right]

    engine = engine_of(model, chunked_prefill_size=23, page_size=4, speculative_num_draft_tokens=9)
    together = run(engine, [opening(i, prompts[i], params[i]) for i in range(6)], proposals)
    assert [together.new[i] for i in range(6)] == alone


def test_unsupported_models_run_module_by_module(tmp_path):
    folder = write_model(tmp_path / "gelu", hidden_act="gelu")
    assert isinstance(load_model(folder).runner, ModuleRunner)
    folder = write_model(tmp_path / "llama")
    assert isinstance(load_model(folder, attention_backend="torch_native").runner, ModuleRunner)


def test_a_library_of_another_system_is_named(tmp_path, monkeypatch):
    (tmp_path / "kernels.so").write_bytes(b"made elsewhere")
    monkeypatch.setattr(native.Library, "compiled", lambda _: tmp_path / "kernels.so")
    with pytest.raises(library.Unavailable, match=r"kernels\.so cannot be loaded"):
        library.load.__wrapped__()


def test_a_compiler_that_hangs_or_fails_is_named(tmp_path, monkeypatch):
    for script, longest, message in (
        ("sleep 5", 0.2, "did not compile outrider-kernels in 0 s"),
        ("echo an error >&2; false", 60.0, "an error"),
    ):
        compiler = tmp_path / "g++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(native, "_TIMEOUT", longest)
        with pytest.raises(library.Unavailable, match=message):
            library.build.KERNELS.compile(str(compiler), tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


def test_without_kernels_pytorch_serves_and_narrow_weights_are_refused(tmp_path, monkeypatch):
    folder = write_model(tmp_path)
    expected = run(engine_of(load_model(folder)), [opening(1, [5, 6, 7])]).new

    def gone():
        raise library.Unavailable("there is no C++ compiler")

    monkeypatch.setattr(library, "load", gone)
    model = load_model(folder)
    assert isinstance(model.runner, ModuleRunner)
    assert run(engine_of(model), [opening(1, [5, 6, 7])]).new == expected
    with pytest.raises(ConfigError, match=r"--quantization int8 needs the compiled kernels.*no C\+\+ compiler"):
        load(folder, TargetConfig(device="cpu", quantization="int8"))
    with pytest.raises(ConfigError, match="--attention-backend native is not available"):
        load(folder, TargetConfig(device="cpu", attention_backend="native"))
    assert weight_quantization.cpu_format(None) is None


def test_prompts_that_exceed_the_cache_have_the_bits_of_short_chunks(tmp_path):
    """A matrix unit multiplies the long chunk's rows a block of k at a time."""
    model = load_model(write_model(tmp_path, intermediate_size=1600, max_position_embeddings=1024), dtype="bfloat16")
    prompt = np.random.default_rng(3).integers(4, VOCAB, 450).tolist()
    runs = []
    for size in (512, 60):
        request = opening(1, prompt, max_tokens=3, logprobs=2, prompt_logprobs=2)
        runs.append(run(engine_of(model, chunked_prefill_size=size), [request]))
    whole, parts = ([commit.logprobs.values for commit in result.commits[1]] for result in runs)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))
    firsts = [result.commits[1][0].prompt_logprobs.values for result in runs]
    assert len(firsts[0]) == len(prompt) - 1
    assert np.array_equal(*firsts)
