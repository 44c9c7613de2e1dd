"""Random steps behind one in flight that has draft tokens, as the device prepares them."""

import numpy as np
import torch

from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.acceptance import accepted_path
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import SpeculationTree
from services.target.engine.launching.in_flight import expecting
from services.target.engine.launching.prepare import prepare
from services.target.speculation.survivors import room_for, tree_tables
from services.target.step.batch import SessionWork, build
from tests.support.target.driving import opening, random_tree
from tests.support.target.works import shuffled_allocator

CPU = torch.device("cpu")
TOKENS = 4  # so few that trees branch and samples meet them


class Case:
    """Sessions with a step in flight: their trees, what it verifies of them, and its samples."""

    def __init__(self, seed, sessions, most=12, room=9):
        rng = self.rng = np.random.default_rng(seed)
        self.page_size = int(rng.integers(1, 5))
        self.allocator = shuffled_allocator(rng, 1000, self.page_size)
        self.sessions, self.trees, self.drafts, self.samples, self.lasts = [], [], [], [], []
        for i in range(sessions):
            text = rng.integers(0, TOKENS, rng.integers(1, 20)).tolist()
            params = SamplingParams(float(i % 2), seed=i)
            session = Session(opening(i, text, params), PrefixCache(self.allocator))
            tree = SpeculationTree(session.tokens)
            tree.merge(random_tree(rng, i, text, TOKENS, int(rng.integers(1, 4 * most))))
            draft = tree.select(int(rng.integers(0, most + 1)))
            tree.merge(random_tree(rng, i, text, TOKENS, int(rng.integers(1, most))))  # arrives while it computes
            own = rng.integers(-2, TOKENS, len(draft) + 1)
            for parent, token in zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True):
                if rng.random() < 0.6:
                    own[parent + 1] = token
            self.sessions.append(session)
            self.trees.append(tree)
            self.drafts.append(draft)
            self.samples.append(own)
            self.lasts.append(len(text) + int(rng.integers(0, 14)))
        sizes = [len(own) for own in self.samples]
        self.roots = (np.cumsum(sizes) - sizes).tolist()
        self.tables = tree_tables(self.trees, self.drafts, self.roots, self.lasts)
        self.tables.sessions[3] = rng.integers(0, room, sessions)

    def go_on(self):
        """Let all sessions go on: with a bonus token, and room behind it."""
        for one, session in enumerate(self.sessions):
            self.lasts[one] = self.tables.sessions[2, one] = session.length + 40
            self.samples[one] = np.maximum(self.samples[one], 0)
        return self

    def taken(self, one):
        """Accepted nodes and the bonus token of a session."""
        return accepted_path(self.drafts[one], self.samples[one])

    def followed(self, one):
        """The draft that the host verifies next, once it knows the samples."""
        path, bonus = self.taken(one)
        tree, draft = self.trees[one], self.drafts[one]
        if bonus < 0:
            return room_for(0)
        tree.commit(np.array([*draft.tokens[path].tolist(), bonus], np.uint32))
        levels = self.lasts[one] - (tree.length - 1)
        room = int(self.tables.sessions[3, one])
        return tree.select(room, levels) if levels > 0 else room_for(0)


def prepared_batch(case):
    """The batch of a prepared step, laid out by the host, what the device makes of it, and the sessions' works."""
    works = []
    for session, draft, room in zip(case.sessions, case.drafts, case.tables.sessions[3].tolist(), strict=True):
        reach = int(draft.depths.max(initial=0))
        session.table.reserve(session.length + 1 + reach + room)
        chunk = Chunk(session, session.length, session.length + 1)
        works.append(SessionWork(chunk, room_for(room), reach))
    with expecting(case.sessions):
        batch = build(works, CPU)
        samples = torch.from_numpy(np.concatenate(case.samples))
        settled, prepared = prepare(batch, works, case.sessions, samples, case.tables, follows=False)
    return batch, settled, prepared, works


def known_works(case: Case) -> list[SessionWork]:
    """The same step as the host would lay it out with the samples read. Commits them."""
    known = []
    for one, session in enumerate(case.sessions):
        path, bonus = case.taken(one)
        session.append(np.array([*case.drafts[one].tokens[path].tolist(), bonus], np.uint32))
        known.append(SessionWork(Chunk(session, session.length - 1, session.length), case.followed(one)))
    return known


def real_rows(works, known):
    """The rows of a prepared batch, and its draft tokens, that are no filler. [T] and [N] bool."""
    rows = [np.arange(len(work.draft) + 1) <= len(other.draft) for work, other in zip(works, known, strict=True)]
    nodes = [np.arange(len(work.draft)) < len(other.draft) for work, other in zip(works, known, strict=True)]
    return np.concatenate(rows), np.concatenate(nodes)
