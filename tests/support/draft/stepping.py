"""A draft model and one session, stepped by hand; returns logits where the drafter returns candidates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from services.draft.kernels.base import Paging
from services.draft.model.layers.decoder import head
from services.draft.model.layers.kv_cache import make_pools
from services.draft.model.programs.program import Constants, states
from services.draft.sessions.batch import InputLayout, SessionWork, StepBuffer, StepShape, build_inputs
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.prefix_kv import PrefixKV
from services.draft.sessions.session import DraftSession
from tests.support.draft.helpers import request

PAGE = 8


class Stepper:
    def __init__(self, config, params, tokens, paging=Paging(PAGE)):  # noqa: B008
        self.config, self.params, self.paging = config, params, paging
        self.prefix = PrefixCache(PageAllocator(64, PAGE))
        self.pools = make_pools(config, 64, PAGE, jnp.float32)
        self.session = DraftSession(request(1, tokens), TreeLimits(), ())
        self.prefix_kv = PrefixKV(self.prefix, self.session.tokens, shift=int(config.head.uses_features))
        self.moves = []

    def run(self, rows, **work):
        """One step of `rows` rows. work: as of SessionWork. Returns logits [rows, V]."""
        width = self.config.hidden_size if self.config.head.uses_features else 0
        stacked = len(self.config.layers) if self.config.stacked else 0
        work = SessionWork(self.session, self.prefix_kv, **work)
        inputs = build_inputs(
            StepBuffer(InputLayout(StepShape(1, rows, rows), 40, width, stacked, self.config.chained)),
            [work],
            self.moves,
        )
        self.moves = []
        logits, self.pools = _logits(self.config, self.paging, self.params, self.pools, inputs)
        self.prefix_kv.feed(work.feed)
        return np.asarray(logits)[0]

    def commit(self, tokens, ready=True):
        """Commit tokens, of which the first are nodes of the tree."""
        session, prefix_kv = self.session, self.prefix_kv
        self.moves = prefix_kv.accept(session.length, len(tokens), session.tree.path_of(tokens))
        kept = session.commit(np.array(tokens, np.uint32), root_expanded=ready)
        prefix_kv.renumber(kept, range(len(kept)))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _logits(config, paging, params, pools, inputs):
    x, pools = states(Constants(config, paging, 1, config.vocab_size), params, pools, inputs)
    return head(params, x, 2**31 - 1, config.softcap, config.factor), pools
