"""The target alone on a CPU: steps against their floor, and proposals against plain decoding.

step         engine steps of one session with 1, 8 and 16 tokens, by number format of the weights. The floor is the
             time to read as many bytes as the weights and the session's keys and values have, taken between steps
batch        plain decoding of several sessions
first token  latency of a short prompt
proposals    tokens/s with 1 to 64 sessions: plain decoding, with an accurate drafter and with a useless one. Both
             claim an acceptance of 0.9; the accurate drafter's is 0.8, the useless one's 0. Drafting takes no time
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.flags import positive_int
from bench.harness.report import Report, new_figure
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import UNLIMITED_DRAFT, Proposal, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import TreeSlice
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu.bandwidth import Reader
from services.target.kernels.pools import token_bytes
from services.target.model.native import ProgramRunner
from services.target.process.app import build_engine
from services.target.process.costs import step_by_step
from services.target.speculation.budget import Budget, Selection
from services.target.speculation.modes.policy import ModePolicy

FORMATS = ("float32", "bfloat16", "int8", "int4")
GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 200  # tokens
_SWEEP_INTERVAL = 8  # steps of each size between two floor measurements, which evict the caches
BATCH_SESSIONS = 8
CLAIMED_PROBABILITY, ACCURATE_RATE = 0.9, 0.8  # score of a draft token; acceptance rate of the accurate drafter
CHAIN_LENGTH = 8  # draft tokens of a proposal
_REPEATS = 4
# Seconds that the mode selector needs. More than a few sessions start with half a minute of plain decoding; the first
# trial of proposals may lose while their acceptance is unknown, and the second follows 15 s later.
_FEW_SESSIONS, _LEARNING_SECONDS_FEW, _LEARNING_SECONDS_MANY = 2, 10.0, 60.0
_KINDS = ("accurate", "useless")
# Proposes for a session, given all of its tokens.
Drafter = Callable[[int, list[int]], Proposal | None]


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/target.*."""
    parser = argparse.ArgumentParser(prog="outrider bench target", description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int8", "int4"],
                        help="number formats of the weights; proposals use the first")  # fmt: skip
    parser.add_argument("--sessions", nargs="+", type=positive_int, default=[1, 2, 4, 8, 16, 32, 64],
                        help="concurrent sessions with proposals")  # fmt: skip
    parser.add_argument("--steps", type=positive_int, default=60, help="timed steps of each figure")
    args = parser.parse_args(argv)
    steps = Report("target-steps", "The target on a CPU: steps against their floor")
    proposals = Report("target-proposals", "The target on a CPU: proposals against plain decoding")
    threads = torch.get_num_threads()
    for name in args.formats:
        torch.set_num_threads(threads)  # loading a program leaves PyTorch one
        config = config_of(name, max(BATCH_SESSIONS, *args.sessions))
        engine = build_engine(checkpoint.resolve(config.model_path), config)
        measure_steps(steps, engine, name, args.steps)
        if name == args.formats[0]:
            plain_engine = TargetEngine(engine.model, config)
            plain_engine.speculation.planner.budget = Budget(copy.deepcopy(engine.speculation.planner.budget.cost))
            for sessions in args.sessions:
                plain, speculative = InterleavedEngine(plain_engine), InterleavedEngine(engine)
                measure_proposals(proposals, plain, speculative, sessions, args.steps)
            del plain_engine
    steps.notes += [
        "floor: reading as many bytes as a step's weights, keys and values have, with all threads, between steps; "
        "medians",
        "step: single steps; session, sessions: with multi-step decoding, as served",
        "of floor: floor / step; against plain: a step / a step of a single token, measured alternately",
    ]
    proposals.notes += [
        f"proposals of {CHAIN_LENGTH} draft tokens with a claimed acceptance of {CLAIMED_PROBABILITY:.0%}; accurate: "
        f"{ACCURATE_RATE:.0%}, useless: 0 %",
        "plain: tokens/s of plain decoding; others: speedup over it. The steps of two engines of one model, with and "
        "without proposals, are interleaved, so that drift of the machine's speed cancels",
        "learning: while the engine estimates acceptance and costs; the others: after "
        f"{_LEARNING_SECONDS_FEW:.0f} s with proposals, {_LEARNING_SECONDS_MANY:.0f} s with more than {_FEW_SESSIONS} "
        "sessions, which start with plain decoding",
    ]
    plot(proposals)
    steps.write()
    proposals.write()


def config_of(name: str, sessions: int) -> TargetConfig:
    """The configuration of the default model with weights in a number format."""
    flags: dict[str, Any] = {"quantization": name} if name.startswith("int") else {"dtype": name}
    return TargetConfig(
        max_running_requests=sessions,
        max_total_tokens=32 * 1024,
        disable_radix_cache=True,
        self_speculation="off",
        **flags,
    )


def open_request(session_id: int, prompt: NDArray[np.uint32], new: int) -> OpenSession:
    """A greedy session of `new` tokens."""
    return OpenSession(session_id, prompt, len(prompt), GREEDY, StopConditions(new, ignore_eos=True))


def random_prompt(seed: int, length: int) -> NDArray[np.uint32]:
    """Random token ids below 20,000: [length] uint32."""
    return np.random.default_rng(seed).integers(300, 20_000, length).astype(np.uint32)


# --- steps ---


def measure_steps(report: Report, engine: TargetEngine, name: str, steps: int) -> None:
    """Measure steps of one session by size, of several sessions, and the first token."""
    runner = engine.model.runner
    assert isinstance(runner, ProgramRunner), "the floor needs the compiled program"
    size = runner.weight_bytes + CONTEXT * token_bytes(engine.model.shapes, engine.model.cache_dtype)
    floor = Floor(runner.threads, size)
    counts = (1, 8, 16)
    taken = verification_steps(engine, counts, steps, between=floor.measure)
    for tokens, seconds in zip(counts, taken, strict=True):
        report.add(
            weights=name, what=f"step of {tokens} tokens", ms=1e3 * seconds, **floor.against(seconds),
            **{"against plain": seconds / taken[0], "tokens/s": ""},
        )  # fmt: skip
    floor = Floor(runner.threads, size)
    seconds = batch_step(engine, 1, steps, CONTEXT, floor.measure)
    report.add(
        weights=name, what="1 session, plain", ms=1e3 * seconds, **floor.against(seconds), **{"tokens/s": 1 / seconds}
    )
    seconds = batch_step(engine, BATCH_SESSIONS, steps)
    throughput = {"tokens/s": BATCH_SESSIONS / seconds}
    report.add(weights=name, what=f"{BATCH_SESSIONS} sessions, plain", ms=1e3 * seconds, **throughput)
    seconds = min(first_token(engine, seed) for seed in range(5))
    report.add(weights=name, what="first token of a prompt of 48 tokens", ms=1e3 * seconds)


class Floor:
    """The time to read `size` bytes, measured between steps because memory bandwidth varies over time."""

    def __init__(self, threads: int, size: int) -> None:
        self._reader = Reader(threads)
        self._size = size
        self._rates: list[float] = []  # bytes/s

    def measure(self) -> None:
        """Read the bytes once."""
        self._rates.append(self._reader.bandwidth(self._size))

    def against(self, seconds: float) -> dict[str, float]:
        """Columns of a report for steps of `seconds`."""
        rate = float(np.median(self._rates))
        floor = self._size / rate
        return {"floor_ms": 1e3 * floor, "of floor": floor / seconds, "GB/s": rate / 1e9}


class _VerifyAll(Budget):
    """A verification budget without limit."""

    def select(self, drafts: Sequence[TreeSlice], *_: Any, **__: Any) -> Selection:
        return Selection([len(draft) for draft in drafts], 0.0)


def _no_op() -> None:
    pass


def verification_steps(
    engine: TargetEngine,
    counts: Sequence[int],
    steps: int,
    context: int = CONTEXT,
    between: Callable[[], None] = _no_op,
) -> list[float]:
    """Median seconds of steps of one session for several numbers of tokens, measured alternately.

    All draft tokens are rejected.
    context: tokens before the first step; fewer if the session would become too long
    between: called between steps, rarely enough that its effect on the caches does not change the medians
    """
    budget, most = engine.speculation.planner.budget, engine.speculation.planner.max_tokens
    engine.speculation.planner.budget = _VerifyAll()
    new = len(counts) * (steps + 4) + 4
    prompt = random_prompt(1, min(context, engine.sessions.longest - new)) % engine.model.vocab_size
    engine.open(open_request(1, prompt, new))
    while not engine.step().commits:  # the prompt
        pass
    times: dict[int, list[float]] = {tokens: [] for tokens in counts}
    with step_by_step(engine):
        for turn in range(len(counts) * (steps + 4)):
            if turn % (_SWEEP_INTERVAL * len(counts)) == 0:
                between()
            engine.speculation.planner.max_tokens = tokens = counts[turn % len(counts)]
            engine.sessions.by_id[1].tree.clear()
            for depth in range(tokens - 1):
                engine.sessions.by_id[1].tree.add(depth - 1, 7, 0.0)
            start = time.perf_counter()
            engine.step()
            times[tokens].append(time.perf_counter() - start)
    engine.close(1)
    engine.speculation.planner.budget, engine.speculation.planner.max_tokens = budget, most
    return [float(np.median(taken[4:])) for taken in times.values()]


def batch_step(
    engine: TargetEngine, sessions: int, steps: int, context: int = 48, between: Callable[[], None] = _no_op
) -> float:
    """Median seconds of a plain step of several sessions, with multi-step decoding as served.

    context: tokens of each session before the first step. between: as in `verification_steps`
    """
    for i in range(sessions):
        engine.open(open_request(i, random_prompt(i, context) % engine.model.vocab_size, steps + 40))
    times = []
    while engine.scheduler.running or engine.scheduler.waiting:
        start = time.perf_counter()
        output = engine.step()
        if len(output.commits) == sessions:
            times.append((time.perf_counter() - start) / output.steps)
            if len(times) % _SWEEP_INTERVAL == 0:
                between()
    return float(np.median(times[1:-1]))


def first_token(engine: TargetEngine, seed: int) -> float:
    """Seconds from the arrival of a prompt of 48 tokens to its first token."""
    start = time.perf_counter()
    engine.open(open_request(1, random_prompt(seed, 48), 2))
    while not engine.step().commits:
        pass
    seconds = time.perf_counter() - start
    engine.close(1)
    return seconds


# --- proposals ---


def measure_proposals(
    report: Report, plain: InterleavedEngine, speculative: InterleavedEngine, sessions: int, steps: int
) -> None:
    """Measure the speedup of proposals over plain decoding, while the engine learns and afterwards."""
    new = 4 * steps
    prompts = {i: random_prompt(i, 48) for i in range(1, sessions + 1)}
    texts = run_interleaved([plain], prompts, new)[0]
    rates: list[float] = []
    ratios: dict[str, float] = {}

    def ratio() -> float:
        plain_texts, speculative_texts = run_interleaved([plain, speculative], prompts, new)
        assert plain_texts == speculative_texts == texts, "proposals never change the text"
        rates.append(plain.rate)
        return speculative.rate / plain.rate

    learning_seconds = _LEARNING_SECONDS_FEW if sessions <= _FEW_SESSIONS else _LEARNING_SECONDS_MANY
    for kind in _KINDS:
        speculative.restart_learning(simulated_drafter(kind, prompts, texts))
        learning = ratio()
        while speculative.busy_seconds < learning_seconds:
            run_interleaved([speculative], prompts, new)
        learnt = [ratio() for _ in range(_REPEATS)]
        ratios |= {f"{kind} / plain": float(np.median(learnt)), f"{kind} / plain, learning": learning}
    report.add(sessions=sessions, plain=float(np.median(rates)), **ratios)


class InterleavedEngine:
    """An engine whose clock is stopped while the steps of another engine run.

    new_tokens: since `begin`; busy_seconds: in steps since `restart_learning`; rate: tokens/s of the steps with all
    sessions. Steps after the end of the first session are excluded, because their batch is smaller.
    """

    def __init__(self, engine: TargetEngine) -> None:
        self.engine = engine
        self.paths: dict[int, list[int]] = {}
        self.new_tokens = 0
        self.rate = 0.0
        self._seconds = 0.0
        self._draft_budgets: dict[int, int] = {}
        self._paused_seconds, self._paused_since = 0.0, time.perf_counter()
        self.restart_learning(None)

    def restart_learning(self, drafter: Drafter | None) -> None:
        """Discard the engine's estimates and set the drafter; None for plain decoding."""
        self.drafter = drafter
        self.busy_seconds = 0.0
        self.engine.forget_measurements()
        self.engine.speculation.policy = ModePolicy(clock=lambda: time.perf_counter() - self._paused_seconds)

    def begin(self, prompts: dict[int, NDArray[np.uint32]], new: int) -> None:
        """Open the sessions and compute their prompts."""
        self.paths = {i: prompt.tolist() for i, prompt in prompts.items()}
        self._draft_budgets = dict.fromkeys(prompts, UNLIMITED_DRAFT)
        for i, prompt in prompts.items():
            self.engine.open(open_request(i, prompt, new))
        while any(len(self.paths[i]) == len(prompts[i]) for i in prompts):
            self.step([])
        self.new_tokens, self._seconds = 0, 0.0

    def proposals(self) -> list[Proposal]:
        """The present proposals of the drafter, for sessions with a draft budget."""
        if self.drafter is None:
            return []
        proposals = [self.drafter(i, path) for i, path in self.paths.items() if self._draft_budgets[i]]
        return [proposal for proposal in proposals if proposal is not None]

    def step(self, proposals: list[Proposal]) -> None:
        """Run one step with proposals."""
        start = time.perf_counter()
        self._paused_seconds += start - self._paused_since
        self.engine.launcher.clock.read += start - self._paused_since  # otherwise the pause would count as waiting
        self.engine.receive(proposals, ())
        output = self.engine.step()
        self._paused_since = time.perf_counter()
        self._seconds += self._paused_since - start
        self.busy_seconds += self._paused_since - start
        for commit in output.commits:
            self.paths[commit.session_id] += commit.tokens.tolist()
            self._draft_budgets[commit.session_id] = commit.draft_budget
            self.new_tokens += len(commit.tokens)
        if self.engine.scheduler.running == len(self.paths):
            self.rate = self.new_tokens / self._seconds


def run_interleaved(
    engines: Sequence[InterleavedEngine], prompts: dict[int, NDArray[np.uint32]], new: int
) -> list[dict[int, list[int]]]:
    """Run equal sessions on all engines; the engine with the fewest new tokens runs the next step.

    Returns the new tokens of each session, for each engine.
    """
    for engine in engines:
        engine.begin(prompts, new)
    while running := [engine for engine in engines if not engine.engine.idle]:
        engine = min(running, key=lambda engine: engine.new_tokens)
        engine.step(engine.proposals())
    return [{i: path[len(prompts[i]) :] for i, path in engine.paths.items()} for engine in engines]


def simulated_drafter(kind: str, prompts: dict[int, NDArray[np.uint32]], texts: dict[int, list[int]]) -> Drafter:
    """A drafter that knows the texts and corrupts some draft tokens. kind: accurate or useless."""
    rng = np.random.default_rng(0)
    score = np.full(CHAIN_LENGTH, np.log(CLAIMED_PROBABILITY), np.float32)

    def propose(session_id: int, path: list[int]) -> Proposal | None:
        done = len(path) - len(prompts[session_id])
        correct = np.array(texts[session_id][done : done + CHAIN_LENGTH], np.uint32)
        if not len(correct):
            return None
        wrong = rng.random(len(correct)) > (ACCURATE_RATE if kind == "accurate" else 0.0)
        tokens = np.where(wrong, (correct + 1) % 1000, correct).astype(np.uint32)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        return Proposal(session_id, len(path), path_hash(np.array(path)), tokens, parents, score[: len(tokens)])

    return propose


def plot(report: Report) -> None:
    """Speedup over plain decoding by sessions."""
    figure = new_figure(6, 3.5)
    axes = figure.subplots()
    sessions = [row["sessions"] for row in report.rows]
    for kind in _KINDS:
        axes.plot(sessions, [row[f"{kind} / plain"] for row in report.rows], marker="o", label=f"{kind} proposals")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="concurrent sessions", ylabel="speedup over plain decoding", ylim=(0, None))
    axes.set_xticks(sessions, [str(n) for n in sessions])
    axes.legend(frameon=False)
    report.save(figure)
