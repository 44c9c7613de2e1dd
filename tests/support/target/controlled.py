"""A running target under control, and the updates that it gets."""

import json
import shutil
import struct

import numpy as np
from safetensors.torch import load_file, save_file

from outrider.speculation.sampling import SamplingParams
from services.target.process.control import Control
from tests.support.target.driving import chain, engine_of, load_model, opening, random_tree
from tests.support.tiny import VOCAB

PROMPTS = [[5, 6, 7], list(range(30, 75)), [9] * 20, [200]]


def requests(temperature, **options):
    params = SamplingParams(temperature, seed=4)
    return [opening(i, prompt, params, max_tokens=30, **options) for i, prompt in enumerate(PROMPTS, start=1)]


def started(folder, **flags):
    engine = engine_of(load_model(folder), **flags)
    return engine, Control(engine, folder, roots=[str(folder.parents[1])])


def knowing(new):
    """Proposals that contain the text `new`, among others."""

    def proposals(session_id, path):
        rng = np.random.default_rng(len(path))
        done = len(path) - len(PROMPTS[session_id - 1])
        ahead = chain(session_id, path, new[session_id][done : done + 3])
        return [random_tree(rng, session_id, path, VOCAB, 5), ahead]

    return proposals


def step(engine, tokens, proposals):
    """One step with proposals; tokens of each session grow."""
    for session_id, path in tokens.items():
        engine.receive(proposals(session_id, path), ())
    output = engine.step()
    assert not output.failures
    for commit in output.commits:
        assert commit.base_length == len(tokens[commit.session_id])
        tokens[commit.session_id] += commit.tokens.tolist()
    return output


def in_parts(control, content, size=1000):
    with control.incoming() as incoming:
        for start in range(0, len(content), size):
            incoming.add(content[start : start + size])
        incoming.finish()
    return incoming


def spoilt(folder, target, **changes):
    """A copy of a checkpoint with other tensors; None leaves one out."""
    shutil.copytree(folder, target)
    tensors = {k: v for k, v in (load_file(folder / "model.safetensors") | changes).items() if v is not None}
    save_file(tensors, target / "model.safetensors")
    return target


def header(entries, rest=b""):
    content = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(content)) + content + rest


def tensor(start, stop, shape=(48,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
