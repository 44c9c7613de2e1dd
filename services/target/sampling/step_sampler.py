"""Sampling of a step: the sessions' parameters, laid out row by row, applied to the logits.

The engine deals in sessions, the device in rows; this module translates between them. The tree mask is not applied
here but in the attention kernels (kernels/reference.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.acceptance import Thresholds
from services.target.kernels.cpu import library
from services.target.kernels.cpu import sampling as compiled
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model, Outputs
from services.target.sampling import compaction, logprobs, penalties, row_params, sampler
from services.target.sampling.compaction import Trees
from services.target.sampling.logprobs import Scores
from services.target.sampling.masks import GrammarRows, Masks
from services.target.sampling.samples import LaunchedStep, ScoredRows
from services.target.sampling.session import TargetSession
from services.target.sampling.thresholds import relax
from services.target.step.batch import Batch, SamplingPlan, SessionWork
from services.target.step.prepared import PreparedSpans
from services.target.step.token_mask import TokenMask
from services.target.step.upload import UploadBatch, upload

Prompts = tuple[Scores, Callable[[Scores], None]]
"""Log-probabilities of prompt tokens, and what stores them once they are on the host."""

_IS_PLAIN, _SAMPLING = attrgetter("plain"), attrgetter("sampling")


class StepSampler:
    """Samples the tokens of steps with a model.

    alongside: compiled kernels sample, so that a runner may do it in the call that computes the logits, which
        multi-step decoding needs
    walks: draft trees are walked on the device
    resamples: a row may be sampled twice, because waiting for the device costs more
    """

    def __init__(self, model: Model, cache: KVCache, thresholds: Thresholds) -> None:
        self._model = model
        self._cache = cache
        self._thresholds = thresholds
        self.walks = self.resamples = model.device.type != "cpu"
        self.alongside = model.device.type == "cpu" and thresholds.exact and library.available()
        self._masks: Masks | None = None

    def plan(self, works: Sequence[SessionWork], entries: Mapping[int, TargetSession]) -> SamplingPlan | None:
        """The plan by which a step's runner samples; None if the plan cannot express it, or there are no rows."""
        if not self.alongside:
            return None
        drawing = [work for work in works if work.chunk.last]
        drawn = [entries[work.chunk.session.id] for work in drawing]
        return sampling_plan(drawing, drawn) if drawing and all(map(_IS_PLAIN, drawn)) else None

    @property
    def exact(self) -> bool:
        """True if a walk along the samples is the verification, so that the device can go on with it."""
        return self.walks and self._thresholds.exact

    def sample(
        self,
        batch: Batch,
        outputs: Outputs,
        works: Sequence[SessionWork],
        entries: Mapping[int, TargetSession],
        prepared: PreparedSpans | None = None,
        *,
        ahead: bool = False,
    ) -> LaunchedStep:
        """Launch the sampling after the roots and nodes of a batch, without waiting for the device.

        outputs: of the model. works: of the batch, in order. entries: the sessions by id. prepared: the batch's
        prepared spans, if it has any. ahead: accepted rows move at once, even if a row must be sampled again, so that a
        prepared step can follow
        """
        drawing = [work for work in works if work.chunk.last]
        drawn = [entries[work.chunk.session.id] for work in drawing]
        prompts = None
        if len(batch.rows.sampled) > batch.sample_count:
            prompts = self._score_prompts(outputs.logits, batch.sample_count, works, entries)
        if not drawing:
            return LaunchedStep(torch.empty(0, dtype=torch.int64, device=self._model.device), None, prompts)
        if batch.sampling is not None:
            return _sampled_alongside(batch, batch.sampling, outputs, prompts)
        if self.alongside:
            return self._sample_compiled(batch, outputs.logits, drawing, drawn, prompts)
        return self._sample_on_device(batch, outputs.logits, drawing, drawn, prompts, prepared, ahead=ahead)

    def _sample_on_device(
        self,
        batch: Batch,
        logits: Tensor,
        drawing: Sequence[SessionWork],
        drawn: Sequence[TargetSession],
        prompts: Prompts | None,
        prepared: PreparedSpans | None,
        *,
        ahead: bool,
    ) -> LaunchedStep:
        """Sample with PyTorch's operators. drawing, drawn: the sessions, row after row."""
        # While the device computes, the host lays out the parameters and sends them in one transfer.
        uploads = UploadBatch()
        requests = list(map(_request, drawing, drawn))
        laid_rows, laid_adjustments = (
            row_params.lay_out(requests, uploads),
            self._adjustments(drawing, drawn, uploads),
        )
        laid_trees = None if prepared is not None else self._trees(drawing, batch, uploads)
        mask = self._mask(drawing, drawn)
        uploads.send(logits.device)
        rows = laid_rows()
        if prepared is not None and not rows.all_greedy:
            prepared.keys(rows.keys)
        banned = (rows.banned_rows, rows.banned_tokens)
        adjusted = sampler.adjusted(logits[: batch.sample_count], banned, laid_adjustments(), mask)
        wait = not (self.resamples and self._thresholds.exact and all(entry.top is None for entry in drawn))
        picked = sampler.sample_adjusted(adjusted, rows, wait=wait)
        if not self._thresholds.exact:
            picked = relax(self._thresholds, adjusted, rows, picked, drawing, requests)
        scored = self._score(logits, picked, drawing, drawn)
        resample = None
        if not wait and rows.may_be_unresolved:
            # Logits of captured steps last until the next launch, which may come before the samples are read.
            kept = adjusted.clone() if adjusted.data_ptr() == logits.data_ptr() else adjusted
            resample = partial(sampler.sample_adjusted, kept, rows)
        launched = LaunchedStep(picked, scored, prompts, resample)
        trees = laid_trees() if laid_trees is not None else None
        if prepared is not None and prepared.width:
            trees = compaction.of_spans(prepared, batch.sample_count)
        if trees is not None and (resample is None or ahead):
            self._cache.move_paths(trees.moves(picked))
            launched.moved = True
        return launched

    def _trees(self, drawing: Sequence[SessionWork], batch: Batch, uploads: UploadBatch) -> Callable[[], Trees] | None:
        """The trees, if the device can walk them."""
        if not self.walks or not any(len(work.draft) for work in drawing):
            return None
        return compaction.lay_out(drawing, batch, uploads)

    def _sample_compiled(
        self,
        batch: Batch,
        logits: Tensor,
        works: Sequence[SessionWork],
        drawn: Sequence[TargetSession],
        prompts: Prompts | None,
    ) -> LaunchedStep:
        """Sample with the compiled kernel. works, drawn: the sessions, row after row."""
        uploads = UploadBatch()
        laid = self._adjustments(works, drawn, uploads)
        uploads.send(logits.device)
        mask = self._mask(works, drawn)
        adjusted = sampler.adjusted(logits[: batch.sample_count], _bans(works, drawn), laid())
        tokens = compiled.sample(adjusted.float(), sampling_plan(works, drawn), mask)
        return LaunchedStep(tokens, self._score(logits, torch.from_numpy(tokens), works, drawn), prompts)

    def _score(
        self, logits: Tensor, tokens: Tensor, works: Sequence[SessionWork], drawn: Sequence[TargetSession]
    ) -> ScoredRows | None:
        """Log-probabilities of the sampled tokens, for sessions that asked for them."""
        tops = [entry.top for entry in drawn if entry.top is not None]
        if not tops:
            return None
        wanted: list[NDArray[np.int64]] = []
        firsts: dict[int, int] = {}
        divisors: list[float] = []
        row = count = 0
        for work, entry in zip(works, drawn, strict=True):
            size = len(work.draft) + 1
            if entry.top is not None:
                firsts[entry.session.id] = count
                wanted.append(np.arange(row, row + size))
                divisors += [entry.divisor] * size
                count += size
            row += size
        (rows,) = upload([np.concatenate(wanted)], logits.device)
        scaled = None
        if any(divisor != 1.0 for divisor in divisors):
            (scaled,) = upload([np.array(divisors, np.float32)[:, None]], logits.device)
        scores = logprobs.score(logits, rows, tokens.index_select(0, rows), max(tops), scaled)
        return ScoredRows(scores, firsts)

    def _score_prompts(
        self, logits: Tensor, first: int, works: Sequence[SessionWork], entries: Mapping[int, TargetSession]
    ) -> Prompts:
        """Log-probabilities of prompts, and a function that stores them. first: the first row that is only scored."""
        asked = [(entries[work.chunk.session.id], work.scored) for work in works if work.scored]
        next_tokens = np.concatenate([logprobs.next_tokens(entry.session.tokens, part) for entry, part in asked])
        scored = [(entry.prompt_scores, part) for entry, part in asked if entry.prompt_scores is not None]
        assert len(scored) == len(asked), "a session whose prompt is scored stores the scores"
        rows = torch.arange(first, first + len(next_tokens), device=logits.device)
        (tokens,) = upload([next_tokens], logits.device)
        top = max(keeper.top for keeper, _ in scored)

        def keep(scores: Scores) -> None:
            row = 0
            for keeper, part in scored:
                keeper.put(scores.logprobs(part.start + 1, slice(row, row + len(part)), keeper.top))
                row += len(part)

        return logprobs.score(logits, rows, tokens, top), keep

    def _mask(self, works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> TokenMask | None:
        """The tokens that grammars allow; computed on the host during the forward pass."""
        if all(entry.matcher is None for entry in drawn):
            return None
        guided: list[GrammarRows] = []
        row = 0
        for work, entry in zip(works, drawn, strict=True):
            if entry.matcher is not None:
                guided.append(GrammarRows(row, entry.matcher, work.draft, _banned(work, entry)))
            row += len(work.draft) + 1
        if self._masks is None:
            self._masks = Masks(self._model.vocab_size, self._model.device)
        return self._masks.fill(guided)

    @staticmethod
    def _adjustments(
        works: Sequence[SessionWork], drawn: Sequence[TargetSession], uploads: UploadBatch
    ) -> Callable[[], penalties.Adjustments | None]:
        if all(entry.tally is None for entry in drawn):
            return lambda: None
        ends = np.cumsum([len(work.draft) + 1 for work in works]).tolist()
        tallies = [
            (end - len(work.draft) - 1, entry.tally, work.draft)
            for work, entry, end in zip(works, drawn, ends, strict=True)
            if entry.tally is not None
        ]
        return penalties.lay_out(tallies, uploads)


def _sampled_alongside(batch: Batch, sampling: SamplingPlan, outputs: Outputs, prompts: Prompts | None) -> LaunchedStep:
    """The tokens that the model's runner has sampled; of one that has not, they are sampled from its logits."""
    tokens, count = outputs.tokens, batch.sample_count
    if tokens is None:
        tokens = compiled.sample(outputs.logits[:count].float(), sampling)
    return LaunchedStep(tokens, None, prompts, steps=len(tokens) // count, iterations=outputs.iterations)


def sampling_plan(works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> SamplingPlan:
    """The kernel's sampling plan. works, drawn: the sessions, row after row."""
    counts, positions = array("q"), array("q")
    for work in works:
        stop, depths = work.chunk.stop, work.draft.depths.tolist()
        counts.append(len(depths) + 1)
        positions.append(stop)
        positions.extend([stop + depth for depth in depths])
    return SamplingPlan(b"".join(map(_SAMPLING, drawn)), counts, positions)


def _request(work: SessionWork, entry: TargetSession) -> row_params.RowRequest:
    session = work.chunk.session
    positions = [session.length, *(session.length + work.draft.depths).tolist()]
    # A grammar's mask includes the banned tokens.
    banned = _banned(work, entry) if entry.matcher is None else [[]] * len(positions)
    return row_params.RowRequest(session.sampling, positions, banned, keyed=work.reach is None)


def _bans(works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> tuple[Tensor, Tensor] | None:
    """Rows and tokens excluded there, for sessions without a grammar; None for none."""
    pairs: list[tuple[int, int]] = []
    row = 0
    for work, entry in zip(works, drawn, strict=True):
        if entry.session.lacking > 0 and entry.matcher is None:
            pairs += [(row + i, token) for i, tokens in enumerate(_banned(work, entry)) for token in tokens]
        row += len(work.draft) + 1
    if not pairs:
        return None
    rows, tokens = torch.tensor(pairs).unbind(1)
    return rows, tokens


def _banned(work: SessionWork, entry: TargetSession) -> list[list[int]]:
    """For each row of a session, the stop tokens excluded by min_tokens."""
    missing = entry.session.lacking
    stop_ids = sorted(entry.stop_ids) if missing > 0 else []
    return [stop_ids if depth < missing else [] for depth in (0, *work.draft.depths.tolist())]
