"""Small targets, heads for them, and records as if a target had generated them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from services.draft.formats.target import read_target
from services.draft.learning.algorithms import DraftShape, algorithm_of
from services.draft.learning.objective import TargetWeights
from services.draft.learning.records.store import Record, Store
from services.draft.learning.records.vocabulary import draft_ids
from tests.support.tiny import VOCAB, write_model

LAYERS = 8
HIDDEN = 48


def target_of(folder, **options):
    return read_target(write_model(folder, num_hidden_layers=LAYERS, tie_word_embeddings=False, **options))


def head_of(target, vocab=64, name="EAGLE3", **shape):
    """An algorithm, ids of its head and first parameters, all numbers such as bfloat16 has."""
    algorithm = algorithm_of(name, target, DraftShape(vocab=vocab, inner=shape.pop("inner", 64), **shape))
    ids = np.sort(np.random.default_rng(3).choice(VOCAB, vocab, replace=False))
    if algorithm.whole_vocabulary:
        ids = np.arange(VOCAB)
    scales = np.array([1, 1, 1, 2, 3, 1], np.float32)[-len(algorithm.states.layers) - 1 :]
    params = algorithm.first_params(target, ids, scales, seed=5)
    return algorithm, ids, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def shared_of(target, ids):
    tensors = target.embedding_and_head(jnp.asarray)
    embed = tensors.get("embed", tensors["head"].T)
    return TargetWeights(embed, tensors["head"][:, ids], jnp.asarray(draft_ids(ids, VOCAB)))


def random_record(rng, length, prompt, *, ids=None, states=4, **options):
    """ids: of the tokens; by default any. states: of each token."""
    tokens = rng.choice(np.arange(VOCAB) if ids is None else ids, length).astype(np.uint32)
    states = rng.standard_normal((length - 1, states * HIDDEN)).astype(ml_dtypes.bfloat16)
    facts = {"prompt": prompt, "first": prompt, "temperature": 0.0, "seed": 1} | options
    return Record(tokens, states.view(np.uint8), **facts)


def store_of(folder, records):
    store = Store(folder, {"layers": [2, 4, 5]}, records[0].rows.shape[1])
    for job, record in enumerate(records):
        store.add(job, [record])
    return store


def states_of_cycle(target, tokens):
    """The cyclic target's states at all tokens but the last: its state is the embedding."""
    embed = np.asarray(read_target(target).embedding_and_head(lambda a: a)["embed"])
    return embed[tokens[:-1]].astype(ml_dtypes.bfloat16).view(np.uint8)
