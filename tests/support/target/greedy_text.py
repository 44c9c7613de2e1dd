"""The greedy text of a small model by `transformers`, the check that the target generates the same, and its logits."""

import numpy as np
import torch
import transformers

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.step.batch import SessionWork, build
from tests.support.target.driving import chain, engine_of, opening, random_tree, run
from tests.support.tiny import VOCAB

PROMPT = np.random.default_rng(3).integers(4, VOCAB, 45).tolist()
NEW = 16
CHUNKS = {1: 7, 16: 512, 64: 13}  # chunk size by page size


def greedy(folder, remote=False):
    """New tokens by `transformers` alone, with its own attention and cache."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=remote)
    model.generation_config = transformers.GenerationConfig()
    out = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=NEW, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


def proposals_near(expected, seed):
    """Random trees, and chains that start like the expected text and then diverge."""
    rng = np.random.default_rng(seed)

    def proposals(session_id, tokens):
        done = len(tokens) - len(PROMPT)
        true = expected[done : done + int(rng.integers(0, 4))] if done >= 0 else []
        near = [*true, int(rng.integers(0, VOCAB))]
        return [random_tree(rng, session_id, tokens, VOCAB, 6), chain(session_id, tokens, near)]

    return proposals


def check_text(model, expected):
    """Every page size, with prompt chunks of odd sizes and with proposals, next to another session."""
    for page_size, chunk in CHUNKS.items():
        engine = engine_of(model, page_size=page_size, chunked_prefill_size=chunk, max_running_requests=4,
                           speculative_num_draft_tokens=10)  # fmt: skip
        sessions = [opening(1, PROMPT, max_tokens=NEW), opening(2, PROMPT[::-1], max_tokens=NEW)]
        result = run(engine, sessions, proposals_near(expected, page_size))
        assert result.new[1] == expected
        assert 0 < result.accepted < result.verified


def logits_of(model):
    """Logits of every token of a prompt."""
    cache = model.new_cache(8, 16)
    session = Session(opening(1, PROMPT), PrefixCache(PageAllocator(8, 16), enabled=False))
    session.table.reserve(len(PROMPT))
    rows = []
    with torch.inference_mode():
        for i in range(len(PROMPT)):
            session.length = i + 1
            batch = build([SessionWork(Chunk(session, i, i + 1))], torch.device("cpu"))
            rows.append(model.runner.forward(batch, cache).logits.clone())
    return torch.cat(rows)
