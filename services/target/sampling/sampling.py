"""The draws of a step: what its sessions asked for, row by row, brought to the logits; and what came out.

Between the engine, which knows sessions, and the device, which knows rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.acceptance import Thresholds
from outrider.speculation.proposal import Logprobs
from services.target.features.features import Features
from services.target.kernels.cpu import library
from services.target.kernels.cpu import sampling as compiled
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling import compaction, logprobs, penalties, sampler
from services.target.sampling.compaction import Trees
from services.target.sampling.logprobs import Scores
from services.target.sampling.masks import GrammarRows, Masks
from services.target.sampling.session import TargetSession
from services.target.sampling.thresholds import relax
from services.target.step.batch import Batch, SamplingPlan, SessionWork
from services.target.step.download import Download
from services.target.step.programs import LoopIteration
from services.target.step.token_mask import TokenMask
from services.target.step.upload import UploadBatch, upload, use_device

_IS_PLAIN, _SAMPLING = attrgetter("plain"), attrgetter("sampling")


@dataclass(frozen=True)
class StepSamples:
    """What a step drew. tokens: [R], after each root and its nodes, session by session; of several steps [steps * R].

    steps:      in one call; tokens of its session for a fused loop
    iterations: outcomes of a fused loop
    redrawn:    [R] bool, where a token is another than the device took it for at first; None if that is nowhere
    moved:      whether the rows of accepted nodes have moved in the cache already
    """

    tokens: NDArray[np.int64]
    scores: Scores | None = None
    firsts: Mapping[int, int] = field(default_factory=dict)  # of a session that asked: the first of its rows in scores
    redrawn: NDArray[np.bool_] | None = None
    moved: bool = False
    steps: int = 1
    iterations: Sequence[LoopIteration] = ()

    @property
    def model_steps(self) -> int:
        """Steps of the model."""
        return len(self.iterations) or self.steps

    def of(self, first: int, stop: int) -> NDArray[np.int64]:
        """What was drawn in rows first .. stop - 1: after a root and each node, or after a root in each step."""
        return self.tokens[first:stop] if self.steps == 1 else self.tokens[first :: len(self.tokens) // self.steps]

    def logprobs(self, entry: TargetSession, path: Sequence[int], count: int) -> Logprobs | None:
        """Of the `count` first tokens along the accepted nodes of a session that is about to commit them."""
        session = entry.session
        if self.scores is None or entry.top is None:
            return None
        first = self.firsts[session.id]
        rows = [first, *(first + node + 1 for node in path)][:count]
        return self.scores.logprobs(session.length, rows, entry.top)


@dataclass
class _Scored:
    """Log-probabilities of new tokens: on the device, and whose rows they are; see StepSamples."""

    scores: Scores
    firsts: Mapping[int, int]


class LaunchedStep:
    """A step that the device has been given: its draws can be read once, when it is done."""

    def __init__(
        self,
        tokens: Tensor | NDArray[np.int64],
        scored: _Scored | None = None,
        prompts: tuple[Scores, Callable[[Scores], None]] | None = None,
        redraw: Callable[[], Tensor] | None = None,
        steps: int = 1,
        iterations: Sequence[LoopIteration] = (),
    ) -> None:
        """tokens: [R], UNSURE where `redraw` must draw again; prompts: scores, and who keeps them on the host.

        steps, iterations: as of StepSamples.
        """
        self.steps, self.iterations = steps, iterations
        self.tokens = torch.from_numpy(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.moved = False
        self._scored, self._prompts, self._redraw = scored, prompts, redraw
        self._here = tokens if isinstance(tokens, np.ndarray) and not scored and not prompts else None
        if self._here is not None:
            return
        scores = [part for part in (scored and scored.scores, prompts and prompts[0]) if part]
        self._download = Download([self.tokens, *(tensor for part in scores for tensor in part)])

    def read(self) -> StepSamples:
        """What was drawn. Waits for this step alone, the only time in it, unless it must redraw."""
        return (
            self._download_draws()
            if self._here is None
            else StepSamples(self._here, steps=self.steps, iterations=self.iterations)
        )

    @torch.inference_mode()
    def _download_draws(self) -> StepSamples:
        tensors = self._download.read()
        tokens: NDArray[np.int64] = np.asarray(tensors.pop(0).numpy())
        scores = Scores(*(tensors.pop(0) for _ in range(3))) if self._scored else None
        if self._prompts is not None:
            self._prompts[1](Scores(*tensors))
        redrawn = None
        if self._redraw is not None and (tokens == sampler.UNSURE).any():
            redrawn, tokens = tokens == sampler.UNSURE, self._redraw().cpu().numpy()
        return StepSamples(tokens, scores, self._scored.firsts if self._scored else {}, redrawn, self.moved)


class StepSampler:
    """Opens entries, and draws the tokens of steps with a model."""

    def __init__(self, model: Model, cache: KVCache, features: Features, thresholds: Thresholds) -> None:
        self._model = model
        self._cache = cache
        self._features = features
        self._thresholds = thresholds
        self._hurried = model.device.type != "cpu"  # where waiting for the device costs more than drawing a row twice
        self._walks = model.device.type != "cpu"  # trees are walked on the device
        self._compiled = model.device.type == "cpu" and thresholds.exact and library.available()
        self._masks: Masks | None = None

    @property
    def alongside(self) -> bool:
        """Whether a runner may draw along with the logits, without which it cannot go on to another step by itself."""
        return self._compiled

    def plan(self, works: Sequence[SessionWork], entries: Mapping[int, TargetSession]) -> SamplingPlan | None:
        """What a step's runner may draw along with the logits; None if there is more to do than that, or nothing."""
        if not self._compiled:
            return None
        drawing = [work for work in works if work.chunk.last]
        drawn = [entries[work.chunk.session.id] for work in drawing]
        return sampling_plan(drawing, drawn) if drawing and all(map(_IS_PLAIN, drawn)) else None

    @torch.inference_mode()
    def launch(self, batch: Batch, works: Sequence[SessionWork], entries: Mapping[int, TargetSession]) -> LaunchedStep:
        """Have a batch computed, and tokens drawn after its roots and nodes, without waiting for the device.

        works: those of the batch. entries: of their sessions, by id.
        """
        device = self._model.device
        use_device(device)
        drawing = [work for work in works if work.chunk.last]
        drawn = [entries[work.chunk.session.id] for work in drawing]
        logits, tokens, iterations = self._forward(batch)
        prompts = None
        if len(batch.rows.sampled) > batch.drawn:
            prompts = self._score_prompts(logits, batch.drawn, works, entries)
        if not drawing:
            return LaunchedStep(torch.empty(0, dtype=torch.int64, device=device), None, prompts)
        if batch.draws is not None:
            if tokens is None:
                tokens = compiled.draw(logits[: batch.drawn].float(), batch.draws)
            return LaunchedStep(tokens, None, prompts, steps=len(tokens) // batch.drawn, iterations=iterations)
        if self._compiled:
            return self._launch_compiled(batch, logits, drawing, drawn, prompts)
        # The device is busy by now; what the draws need is laid out meanwhile, and follows in one transfer.
        parcel = UploadBatch()
        requests = list(map(_request, drawing, drawn))
        laid_rows, laid_adjustments = sampler.lay_out(requests, parcel), self._adjustments(drawing, drawn, parcel)
        laid_trees = self._trees(drawing, batch, parcel)
        mask = self._mask(drawing, drawn)
        parcel.send(device)
        rows = laid_rows()
        banned = (rows.banned_rows, rows.banned_tokens)
        adjusted = sampler.adjusted(logits[: batch.drawn], banned, laid_adjustments(), mask)
        hurry = self._hurried and self._thresholds.exact and all(entry.top is None for entry in drawn)
        picked = sampler.pick(adjusted, rows, hurry=hurry)
        if not self._thresholds.exact:
            picked = relax(self._thresholds, adjusted, rows, picked, drawing, requests)
        scored = self._score(logits, picked, drawing, drawn)
        redraw = None
        if hurry and rows.may_be_unsure:
            # Logits of captured steps last until the next one is launched, which may be before the draws are read.
            kept = adjusted.clone() if adjusted.data_ptr() == logits.data_ptr() else adjusted
            redraw = partial(sampler.pick, kept, rows)
        launched = LaunchedStep(picked, scored, prompts, redraw)
        if laid_trees is not None and redraw is None:
            self._cache.move_paths(laid_trees().moves(picked))
            launched.moved = True
        return launched

    def _trees(self, drawing: Sequence[SessionWork], batch: Batch, parcel: UploadBatch) -> Callable[[], Trees] | None:
        """The trees, if they can be walked on the device. With several ranks the host tells all what moves."""
        if not self._walks or self._cache.on_move is not None or not any(len(work.draft) for work in drawing):
            return None
        return compaction.lay_out(drawing, batch, parcel)

    def _launch_compiled(
        self,
        batch: Batch,
        logits: Tensor,
        works: Sequence[SessionWork],
        drawn: Sequence[TargetSession],
        prompts: tuple[Scores, Callable[[Scores], None]] | None,
    ) -> LaunchedStep:
        """The kernel's draws. works, drawn: the sessions, row after row."""
        parcel = UploadBatch()
        laid = self._adjustments(works, drawn, parcel)
        parcel.send(logits.device)
        mask = self._mask(works, drawn)
        adjusted = sampler.adjusted(logits[: batch.drawn], _bans(works, drawn), laid())
        tokens = compiled.draw(adjusted.float(), sampling_plan(works, drawn), mask)
        return LaunchedStep(tokens, self._score(logits, torch.from_numpy(tokens), works, drawn), prompts)

    def _score(
        self, logits: Tensor, tokens: Tensor, works: Sequence[SessionWork], drawn: Sequence[TargetSession]
    ) -> _Scored | None:
        """Log-probabilities of the drawn tokens of sessions that asked."""
        tops = [entry.top for entry in drawn if entry.top is not None]
        if not tops:
            return None
        wanted: list[NDArray[np.int64]] = []
        firsts: dict[int, int] = {}
        row = count = 0
        for work, entry in zip(works, drawn, strict=True):
            size = len(work.draft) + 1
            if entry.top is not None:
                firsts[entry.session.id] = count
                wanted.append(np.arange(row, row + size))
                count += size
            row += size
        (rows,) = upload([np.concatenate(wanted)], logits.device)
        return _Scored(logprobs.score(logits, rows, tokens.index_select(0, rows), max(tops)), firsts)

    def _score_prompts(
        self, logits: Tensor, first: int, works: Sequence[SessionWork], entries: Mapping[int, TargetSession]
    ) -> tuple[Scores, Callable[[Scores], None]]:
        """The log-probabilities of prompts, and what keeps them. first: the first row that is only scored."""
        asked = [(entries[work.chunk.session.id], work.scored) for work in works if work.scored]
        next_tokens = np.concatenate([logprobs.next_tokens(entry.session.tokens, part) for entry, part in asked])
        scored = [(entry.prompt_scores, part) for entry, part in asked if entry.prompt_scores is not None]
        assert len(scored) == len(asked), "a session whose prompt is scored keeps the scores"
        rows = torch.arange(first, first + len(next_tokens), device=logits.device)
        (tokens,) = upload([next_tokens], logits.device)
        top = max(keeper.top for keeper, _ in scored)

        def keep(scores: Scores) -> None:
            row = 0
            for keeper, part in scored:
                keeper.put(scores.logprobs(part.start + 1, slice(row, row + len(part)), keeper.top))
                row += len(part)

        return logprobs.score(logits, rows, tokens, top), keep

    def _forward(self, batch: Batch) -> tuple[Tensor, NDArray[np.int64] | None, Sequence[LoopIteration]]:
        """The logits of the sampled rows, [R, V], tokens and iterations as of Outputs; features are set out before."""
        outputs = self._model.runner.forward(batch, self._cache)
        self._features.take(batch, outputs.features)
        return outputs.logits, outputs.tokens, outputs.iterations

    def _mask(self, works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> TokenMask | None:
        """What grammars allow; computed while the device is busy with the forward pass."""
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
        works: Sequence[SessionWork], drawn: Sequence[TargetSession], parcel: UploadBatch
    ) -> Callable[[], penalties.Adjustments | None]:
        if all(entry.tally is None for entry in drawn):
            return lambda: None
        ends = np.cumsum([len(work.draft) + 1 for work in works]).tolist()
        tallies = [
            (end - len(work.draft) - 1, entry.tally, work.draft)
            for work, entry, end in zip(works, drawn, ends, strict=True)
            if entry.tally is not None
        ]
        return penalties.lay_out(tallies, parcel)


def sampling_plan(works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> SamplingPlan:
    """What the kernel is to draw. works, drawn: the sessions, row after row."""
    counts, positions = array("q"), array("q")
    for work in works:
        stop, depths = work.chunk.stop, work.draft.depths.tolist()
        counts.append(len(depths) + 1)
        positions.append(stop)
        positions.extend([stop + depth for depth in depths])
    return SamplingPlan(b"".join(map(_SAMPLING, drawn)), counts, positions)


def _request(work: SessionWork, entry: TargetSession) -> sampler.RowRequest:
    session = work.chunk.session
    positions = [session.length, *(session.length + work.draft.depths).tolist()]
    # A grammar's mask takes banned tokens in.
    banned = _banned(work, entry) if entry.matcher is None else [[]] * len(positions)
    return sampler.RowRequest(session.sampling, positions, banned)


def _bans(works: Sequence[SessionWork], drawn: Sequence[TargetSession]) -> tuple[Tensor, Tensor] | None:
    """Rows and tokens that may not be drawn there, of sessions without a grammar."""
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
    """For each row of a session, the tokens that may not be drawn yet."""
    missing = entry.session.lacking
    stop_ids = sorted(entry.stop_ids) if missing > 0 else []
    return [stop_ids if depth < missing else [] for depth in (0, *work.draft.depths.tolist())]
