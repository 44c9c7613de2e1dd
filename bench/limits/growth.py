"""Draft trees at every position of a recorded answer, and the ranks of its tokens along the recorded text.

Trees are grown as the draft service grows explicit ones (services/draft/model/programs/whole_tree.py), from all roots
of an answer at a time: the prefix KV is the same, as it comes from the target's states.

Legend of shapes: P roots, K nodes that a level expands, H hidden size, V draft vocabulary, G key heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.drafts import kind_of_draft
from outrider.speculation.noise import position_keys
from outrider.speculation.shape import TreeShape
from services.draft.formats.target import read_target
from services.draft.learning.algorithms import Algorithm
from services.draft.learning.algorithms.initial import initial_head
from services.draft.learning.records.batches import Batch
from services.draft.learning.records.store import Record
from services.draft.learning.records.vocabulary import draft_ids
from services.draft.learning.unrolling.unroll import attention_output, prefix, project_heads, visible_places
from services.draft.model.layers.decoder import head as head_logits
from services.draft.model.layers.decoder import layer_input, layer_output
from services.draft.model.layers.heads import Inputs
from services.draft.model.params import Params
from services.draft.model.programs.noise import gumbel_from_bits, token_bits

_ROOTS = 32  # of a program
_MULTIPLE = 256  # of the places of a program


@dataclass(frozen=True)
class Policy:
    """How trees are grown and how their nodes are ranked.

    shape: steps, children of a node and tokens of the tree with the root
    beam: nodes that a level expands; None for as many as a node has children
    sharpness: factor of the logits, by level; the last one holds for further levels
    spread: factor of the scores, noise included, before they are normalized to probabilities, by level. It changes how
        nodes of different parents compare, not the order of siblings
    """

    shape: TreeShape
    beam: int | None = None
    sharpness: tuple[float, ...] = (1.0,)
    spread: tuple[float, ...] = (1.0,)

    def of_level(self, level: int) -> tuple[float, float]:
        """Sharpness and spread of a level, from 0."""
        return self.sharpness[min(level, len(self.sharpness) - 1)], self.spread[min(level, len(self.spread) - 1)]


class Head(NamedTuple):
    """A head that is analysed. ids: the target's id of each entry; draft_ids: [V of the target], -1 without an entry"""

    algorithm: Algorithm
    params: Params
    embed: jax.Array
    ids: jax.Array
    draft_ids: NDArray[np.int32]


class Trees(NamedTuple):
    """Of each root, [P] each: the draft tokens that verification accepts of its tree.

    chosen: of the tokens of the tree; grown: of all candidates
    """

    chosen: NDArray[np.int64]
    grown: NDArray[np.int64]


class Ranks(NamedTuple):
    """Ranks of the recorded tokens behind each root, from 0, [P, depth]; V for tokens outside the draft's vocabulary,
    and -1 behind the end of the text.

    own: the head reads its own states from the second token on; true: always the target's
    """

    own: NDArray[np.int64]
    true: NDArray[np.int64]


class Answer:
    """A recorded answer in the form of a training batch. roots: of which trees are grown, as indices of rows."""

    def __init__(self, record: Record, depth: int) -> None:
        """depth: of the deepest draft token."""
        self.record = record
        tokens = record.tokens.astype(np.int64)
        self.roots = np.arange(max(record.prompt - 1, 0), len(tokens) - 2)
        rows = record.rows[: len(tokens) - 1]
        places = -(-len(rows) // _MULTIPLE) * _MULTIPLE
        size = places + depth + 2
        text = np.zeros(size, np.int64)
        text[: len(tokens) - 1] = tokens[1:]
        states = np.zeros((1, places, rows.shape[1] // 2), ml_dtypes.bfloat16)
        states[0, : len(rows)] = np.ascontiguousarray(rows).view(ml_dtypes.bfloat16)
        none = np.zeros((1, 1), np.int32)
        segments = (np.arange(places) < len(rows)).astype(np.int32)[None]
        self.batch = Batch(
            states, text.astype(np.int32)[None], text.astype(np.int32)[None], np.arange(places, dtype=np.int32)[None],
            segments, none, none, none,
        )  # fmt: skip
        # Row r pairs token r + 1 with state r; its candidates stand at position r + 2.
        self.keys = position_keys(record.seed, np.arange(2, size + 2))

    def chunks(self) -> list[NDArray[np.int64]]:
        """The roots in parts of equal size; the last one is repeated in the last part."""
        count = -(-len(self.roots) // _ROOTS) * _ROOTS
        return list(np.pad(self.roots, (0, count - len(self.roots)), mode="edge").reshape(-1, _ROOTS))


class Grower:
    """Grows trees of one head."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._feed = jax.jit(self._prefix)
        self._grow = jax.jit(self._tree, static_argnums=0)
        self._ranks = jax.jit(self._path, static_argnums=0)

    # --- results ---

    def trees(self, answer: Answer, policy: Policy) -> Trees:
        """Accepted draft tokens at every root."""
        found = []
        for roots, fed in self._fed(answer):
            keys = answer.keys[roots[:, None] + np.arange(policy.shape.steps)]
            grown = self._grow(policy, self.head.params, fed, roots, keys, _temperature(answer))
            tokens, parents, chosen = map(np.asarray, grown)
            found += [
                _accepted(answer.record.tokens[root + 2 :].tolist(), *tree)
                for root, *tree in zip(roots.tolist(), tokens, parents, chosen, strict=True)
            ]
        kept = np.array(found[: len(answer.roots)], np.int64).reshape(-1, 2)
        # The last token is never a draft token: it would be sampled behind the last accepted one anyway.
        most = len(answer.record.tokens) - answer.roots - 3
        return Trees(np.minimum(kept[:, 0], most), np.minimum(kept[:, 1], most))

    def ranks(self, answer: Answer, depth: int) -> Ranks:
        """Ranks of the recorded tokens at every root."""
        found, first = [], []
        draft_ids = self.head.draft_ids[np.asarray(answer.batch.tokens[0])]
        for roots, fed in self._fed(answer):
            at = roots[:, None] + np.arange(depth)
            text, wanted = answer.batch.tokens[0][at + 1], draft_ids[at + 1]
            own = self._ranks(depth, self.head.params, fed, roots, answer.keys[at], text, wanted, _temperature(answer))
            found.append(np.asarray(own))
            first.append(found[-1][:, 0])
        own_ranks = np.concatenate(found)[: len(answer.roots)].astype(np.int64)
        true = np.concatenate(first)[: len(answer.roots)].astype(np.int64)
        # With the target's states, the k-th token behind a root is the first one behind a later root.
        later = np.minimum(np.arange(len(true))[:, None] + np.arange(depth), len(true) - 1)
        left = len(answer.record.tokens) - answer.roots - 2
        known = np.arange(depth) < left[:, None]
        return Ranks(np.where(known, own_ranks, -1), np.where(known, true[later], -1))

    def _fed(self, answer: Answer) -> list[tuple[NDArray[np.int64], Any]]:
        return [(roots, self._feed(self.head.params, answer.batch, roots)) for roots in answer.chunks()]

    # --- programs ---

    def _prefix(self, params: Params, batch: Batch, roots: jax.Array) -> Any:
        """What the head computes from the target's states: handed and output states of the roots, and the prefix KV."""
        feature = self.head.algorithm.feature(params, batch.states.astype(jnp.float32))
        rows = roots[None].astype(jnp.int32)
        sees = visible_places(batch, rows)
        model = self.head.algorithm.model
        handed, state, kv_cache = prefix(model, params, self.head.embed, feature, batch, rows, sees)
        assert handed is not None
        return handed[0], state[0], [own.prefix[0] for own in kv_cache], sees[0]

    def _scores(
        self, params: Params, state: jax.Array, keys: jax.Array, temperature: jax.Array, sharpness: float
    ) -> jax.Array:
        """Scores of all entries with the target's noise, [P, K, V]. state: [P, K, H]; keys: [P, 2]."""
        model = self.head.algorithm.model
        logits = head_logits(params, state, 2**31 - 1, model.softcap, model.factor) * sharpness
        noise = gumbel_from_bits(token_bits(keys, self.head.ids.astype(jnp.uint32)))[:, None]
        divisor = jnp.where(temperature > 0, temperature, 1.0)
        return jnp.where(temperature > 0, jax.nn.log_softmax(logits / divisor, axis=-1) + noise, logits)

    def _tree(
        self, policy: Policy, params: Params, fed: Any, roots: jax.Array, keys: jax.Array, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Candidates of each root by flat number, their parents' flat numbers, and whether they are chosen, [P, C]."""
        handed, state, kv_cache, sees = fed
        children, beam = policy.shape.topk, policy.beam or policy.shape.topk
        handed, state = handed[:, None], state[:, None]
        levels: list[tuple[jax.Array, ...]] = []
        scratch = Scratch.empty(len(kv_cache))
        flat, path = jnp.full((len(roots), 1), -1), jnp.zeros((len(roots), 1))
        offset = 0
        for level in range(policy.shape.steps):
            sharpness, spread = policy.of_level(level)
            scores = self._scores(params, state, keys[:, level], temperature, sharpness)
            top, entries = jax.lax.top_k(scores, children)
            edges = jnp.minimum(spread * top - jax.nn.logsumexp(spread * scores, axis=-1, keepdims=True), 0.0)
            tokens = self.head.ids[entries].reshape(len(roots), -1)
            scores = (path[..., None] + edges).reshape(len(roots), -1)
            levels.append((tokens, jnp.repeat(flat, children, axis=1), scores))
            if level + 1 == policy.shape.steps:
                break
            path, places = jax.lax.top_k(scores, min(beam, scores.shape[1]))
            above = places // children
            flat, offset = offset + places, offset + scores.shape[1]
            token, handed = jnp.take_along_axis(tokens, places, axis=1), _rows(handed, above)
            scratch = scratch.below(above, level)
            state, handed, scratch = self._expand(params, handed, token, roots + level + 1, kv_cache, sees, scratch)
        tokens, parents, scores = (jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True))
        places = jax.lax.top_k(scores, policy.shape.rows - 1)[1]
        chosen = jnp.zeros(scores.shape, bool).at[jnp.arange(len(roots))[:, None], places].set(True)
        return tokens, parents, chosen

    def _path(
        self, depth: int, params: Params, fed: Any, roots: jax.Array, keys: jax.Array, text: jax.Array,
        wanted: jax.Array, temperature: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Ranks of the recorded tokens, with own states from the second one on, [P, depth]. wanted: their entries."""
        handed, state, kv_cache, sees = fed
        handed, state = handed[:, None], state[:, None]
        scratch = Scratch.empty(len(kv_cache))
        ranks = []
        for level in range(depth):
            scores = self._scores(params, state, keys[:, level], temperature, 1.0)[:, 0]
            own = jnp.take_along_axis(scores, jnp.maximum(wanted[:, level : level + 1], 0), axis=1)
            rank = jnp.sum(scores > own, axis=1)
            ranks.append(jnp.where(wanted[:, level] >= 0, rank, scores.shape[1]))
            scratch = scratch.below(jnp.zeros((len(roots), 1), jnp.int32), level)
            state, handed, scratch = self._expand(
                params, handed, text[:, level : level + 1], roots + level + 1, kv_cache, sees, scratch
            )
        return jnp.stack(ranks, axis=1)

    def _expand(
        self, params: Params, handed: jax.Array, token: jax.Array, position: jax.Array, kv_cache: list[jax.Array],
        sees: jax.Array, scratch: Scratch,
    ) -> tuple[jax.Array, jax.Array, Scratch]:  # fmt: skip
        """Compute a level of nodes. handed: of their parents, [P, K, H]; token: [P, K]; position: [P].

        Returns their output states, the states that they pass on, and the scratch with their keys and values.
        """
        model = self.head.algorithm.model
        positions = jnp.broadcast_to(position[:, None], token.shape)
        x, beside = model.head.join(params, Inputs(self.head.embed[token], positions, handed))
        kept = []
        for layer, own, kv, past in zip(model.layers, params["layers"], kv_cache, scratch.kv, strict=True):
            inner, residual = layer_input(layer, own, x, beside if layer.beside else None)
            q, new = project_heads(layer, own, inner, positions)
            kept.append(new if past is None else jnp.concatenate([past, new], axis=3))
            seen = _attend(q, kv, sees, kept[-1], scratch.sees)
            x = layer_output(layer, own, residual, attention_output(layer, own, seen))
        state, passed = model.head.finish(params, x)
        assert passed is not None
        return state, passed, scratch._replace(kv=kept)


class Scratch(NamedTuple):
    """Keys and values of expanded nodes by layer, [P, 2, G, S, D] each, and which of them the last level sees,
    [P, K, S] bool."""

    kv: Sequence[jax.Array | None]
    sees: jax.Array | None = None

    @staticmethod
    def empty(layers: int) -> Scratch:
        """Nothing is expanded."""
        return Scratch([None] * layers)

    def below(self, above: jax.Array, level: int) -> Scratch:
        """What nodes below those of the last level see: the same, and themselves. above: their parents, [P, K]."""
        own = jnp.broadcast_to(jnp.eye(above.shape[1], dtype=bool), (*above.shape, above.shape[1]))
        if self.sees is None or level == 0:
            return self._replace(sees=own)
        return self._replace(sees=jnp.concatenate([_rows(self.sees, above), own], axis=2))


def _rows(x: jax.Array, places: jax.Array) -> jax.Array:
    """x: [P, N, W]; places: [P, K]. Returns [P, K, W]."""
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _attend(q: jax.Array, kv: jax.Array, sees: jax.Array, own: jax.Array, own_sees: jax.Array | None) -> jax.Array:
    """Attention over a common prefix and own nodes.

    q: [P, G, J, K, D]; kv: [2, G, L, D]; sees: [P, L]; own: [P, 2, G, S, D]; own_sees: [P, K, S]
    """
    assert own_sees is not None
    q = q / math.sqrt(q.shape[-1])
    far = jnp.einsum("pgjkd,gld->pgjkl", q, kv[0])
    near = jnp.einsum("pgjkd,pgsd->pgjks", q, own[:, 0])
    far = jnp.where(sees[:, None, None, None], far, -1e30)
    near = jnp.where(own_sees[:, None, None], near, -1e30)
    shares = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    count = far.shape[-1]
    seen = jnp.einsum("pgjkl,gld->pgjkd", shares[..., :count], kv[1])
    seen += jnp.einsum("pgjks,pgsd->pgjkd", shares[..., count:], own[:, 1])
    return seen.transpose(0, 3, 1, 2, 4).reshape(seen.shape[0], seen.shape[3], -1)


def _temperature(answer: Answer) -> NDArray[np.float32]:
    return np.float32(answer.record.temperature)  # type: ignore[return-value]


def _accepted(
    text: list[int], tokens: NDArray[np.int32], parents: NDArray[np.int32], chosen: NDArray[np.bool_]
) -> tuple[int, int]:
    """Nodes along the text: chosen ones, and of all candidates. Arguments of one root, by flat number."""
    node, found, kept, whole = -1, 0, 0, True
    for token in text:
        here = np.flatnonzero((parents == node) & (tokens == token))
        if not len(here):
            break
        node, found = int(here[0]), found + 1
        whole = whole and bool(chosen[node])
        kept += whole
    return kept, found


def read_head(folder: Path, model: Path) -> Head:
    """An EAGLE or EAGLE3 head of a folder. model: folder of the target's checkpoint. Raises ConfigError."""
    target = read_target(model)
    algorithm = initial_head(kind_of_draft(folder), folder, target)
    params = algorithm.params()
    tensors = target.embedding_and_head(lambda array: np.asarray(array, np.float32))
    own = algorithm.vocabulary()
    ids = np.arange(target.vocab_size) if own is None else own
    if "head" not in params:
        params["head"] = jnp.asarray(tensors["head"])
    embed = algorithm.embedding()
    embed = tensors.get("embed", tensors["head"].T) if embed is None else embed
    entries = draft_ids(ids, target.vocab_size)
    return Head(algorithm, params, jnp.asarray(embed), jnp.asarray(ids, jnp.int32), entries)
