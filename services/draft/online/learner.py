"""Learns while the service serves: a step at a time, judged by sessions that it has not learnt from.

    turn   a step of the optimizer on a pack of recent pieces, or, after some of them, a look:
    look   chains of the new weights and of those that serve, on the latest held-back pieces; if the new ones are longer
           by more than chance, the weights are made ready for the service and offered to it; else they go on learning

New weights that are worse by more than chance several times in a row are given up: learning begins anew from those that
serve. Nothing is learnt from a row more often than a few times, so that a service without new texts comes to rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from outrider.serving.messages import OnlineStats
from services.draft.learning.algorithms.served import ServedHead
from services.draft.learning.batches import Batch, PackShape, build, learnt_rows, plan
from services.draft.learning.disk import write_whole
from services.draft.learning.objective import Objective, Shared
from services.draft.learning.optimize import Steady, Trainer
from services.draft.model.layers.heads import Params
from services.draft.online.options import OnlineOptions
from services.draft.online.ring import Pieces, Ring
from services.draft.online.swap import Offer, Served

log = logging.getLogger(__name__)

_CANDIDATES = 24  # pieces of which a pack is made
_SEEN = 4  # packs of held-back pieces that a look takes
_LEAST_SEEN = 64  # rows without which nothing can be said
_GIVE_UP = 3  # looks in a row at which new weights were worse
_RISES = 20  # steps in which the learning rate rises
_DECAY = 0.01


class Learner:
    """The weights that are learnt. Called from one thread, but for `load`."""

    def __init__(
        self,
        head: ServedHead,
        params: Params,
        shared: Shared,
        ring: Ring,
        options: OnlineOptions,
        make: Callable[[Params], Served],
        keep: Callable[[Params], None] = lambda _: None,
        *,
        logits: tuple[float, float | None] = (1.0, None),
        narrow: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """params: those that serve, float32. make: weights for the service. clock: in seconds.

        keep: told of weights that serve from now on; logits: factor and softcap of the target's
        """
        self.offer = Offer()
        self._ring, self._options, self._make, self._keep, self._clock = ring, options, make, keep, clock
        self._shared = shared
        self._objective = Objective(head, options.ahead, options.decay, narrow, *logits)
        self._shape = PackShape(1, options.length, options.learnt, options.ahead)
        self._foretell = jax.jit(self._objective.foretell)
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
        self._serving = params
        schedule = Steady(_RISES, options.rate, 1.0, _DECAY, 1)
        self._trainer = Trainer(self._objective, schedule, shared, self._copy(self._serving))
        self._order = np.random.default_rng(0)
        self._load = OnlineStats()
        self._looked = 0  # steps at the last look
        self._forgotten = self._before = 0  # how often the ring was emptied; rows that were learnt before the last time
        self._worse = 0  # looks in a row at which the new weights were

    def load(self) -> OnlineStats:
        """What was learnt so far; any thread may call."""
        return self._load

    def warm_up(self) -> None:
        """Run all that will be run, so that nothing is compiled later, and forget it."""
        batch = build(Pieces([], self._ring.row_bytes), [], self._shape, self._order)  # type: ignore[arg-type]
        for _ in range(2):  # the second one's state is a first one's result
            self._trainer.take_step(iter([batch]))
        self._accepted(self._serving, [batch])
        jax.block_until_ready(self._make(self._copy(self._trainer.state.params)))
        self._trainer.restart(self._copy(self._serving))

    # --- turns ---

    def turn(self) -> float:
        """Do a little. Returns the seconds that it took, 0 if there was nothing to do."""
        start = self._clock()
        if self._load.steps - self._looked >= self._options.steps:
            self._look()
        elif (batch := self._batch()) is not None:
            self._take_step(batch)
        else:
            return 0.0
        spent = self._clock() - start
        self._load = replace(self._load, seconds=self._load.seconds + spent)
        return spent

    def _batch(self) -> Batch | None:
        """Random pieces, as many as a pack holds; None if what there is has been learnt often enough."""
        if self._forgotten != self._ring.forgotten:
            self._forgotten, self._before = self._ring.forgotten, self._load.rows
        if self._load.rows - self._before >= self._ring.learnt * self._options.epochs:
            return None
        pieces = self._ring.pieces(held_out=False)
        if learnt_rows(pieces.entries)[1].sum() < self._shape.learnt:
            return None
        some = self._order.permutation(len(pieces))[:_CANDIDATES]
        counts = learnt_rows(pieces.entries)[1]
        packs = plan(pieces.entries, some, self._shape, self._order)
        fullest = max(packs, key=lambda pack: int(counts[pack].sum()))
        return build(pieces, [fullest], self._shape, self._order)  # type: ignore[arg-type]

    def _take_step(self, batch: Batch) -> None:
        done = self._trainer.take_step(iter([batch]))
        jax.block_until_ready(self._trainer.state.params)  # so that the time is known
        self._load = replace(
            self._load, steps=self._load.steps + 1, rows=self._load.rows + int((batch.reach > 0).sum())
        )
        if not np.isfinite(done.losses).all():
            log.warning("learning went astray (losses %s); it begins anew from the weights that serve", done.losses)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._trainer.restart(self._copy(self._serving))
        self._worse = 0

    # --- looks ---

    def _look(self) -> None:
        self._looked = self._load.steps
        batches = self._held_back()
        if sum(int((batch.reach > 0).sum()) for batch in batches) < _LEAST_SEEN:
            log.debug("too little is held back to judge %d steps by", self._load.steps)
            return
        params = self._trainer.state.params
        old, new = self._accepted(self._serving, batches), self._accepted(params, batches)
        better = is_better(old, new)
        before, after = 1 + float(old.mean()), 1 + float(new.mean())
        log.log(
            logging.INFO if better else logging.DEBUG,
            "%d steps learnt: accept length %.3f, was %.3f, on %d held-back rows; %s",
            self._load.steps, after, before, len(old), "kept" if better else "not kept",
        )  # fmt: skip
        if better:
            self._swap(params)
        else:
            self._worse = self._worse + 1 if is_better(new, old) else 0
            if self._worse == _GIVE_UP:
                self._begin_anew()
        self._load = replace(
            self._load, kept=self._load.kept + better, rejected=self._load.rejected + (not better),
            accept_length_before=before, accept_length_after=after,
        )  # fmt: skip

    def _swap(self, params: Params) -> None:
        self._serving, self._worse = self._copy(params), 0
        self.offer.make(jax.block_until_ready(self._make(self._serving)))
        self._keep(self._serving)

    def _held_back(self) -> list[Batch]:
        """The latest held-back pieces, in packs."""
        pieces = self._ring.pieces(held_out=True)
        if not len(pieces):
            return []
        latest = np.arange(max(0, len(pieces) - _SEEN * _CANDIDATES), len(pieces))
        packs = plan(pieces.entries, latest, self._shape, self._order)[:_SEEN]
        return [build(pieces, [pack], self._shape, self._order) for pack in packs]  # type: ignore[arg-type]

    def _accepted(self, params: Params, batches: list[Batch]) -> NDArray[np.int64]:
        """How many tokens of a chain would have been accepted behind each row, [n]."""
        found: list[NDArray[Any]] = []
        for batch in batches:
            known, place = map(np.asarray, self._foretell(params, self._shared, batch))
            accepted = np.cumprod(known & (place == 0), axis=0).sum(axis=0)
            found.append(accepted[known[0]])
        return np.concatenate(found)


def is_better(old: NDArray[np.int64], new: NDArray[np.int64]) -> bool:
    """True if the sum has risen by more than the differences of rows would make it by chance. old, new: [n]."""
    difference = new - old
    return bool(difference.sum() > math.sqrt(float((difference * difference).sum())))


def keeper(head: ServedHead, folder: Path | None, origin: str) -> Callable[[Params], None]:
    """Writes weights into a folder, with the fingerprint of the draft that they come from.

    Where that cannot be, as with a full disk, those that were written last stay, and learning goes on.
    """

    def keep(params: Params) -> None:
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / ORIGIN, origin + "\n")  # first: weights without it are taken for another draft's
            head.publish(jax.tree.map(np.asarray, params), np.zeros(0, np.int64), folder)
        except (OSError, SafetensorError) as error:
            log.warning(
                "what was learnt serves, but could not be kept in %s: %s; make room there, the next weights are "
                "written again", folder, error,
            )  # fmt: skip

    return keep


ORIGIN = "origin.txt"
"""File of the fingerprint of the draft that learning began with."""
