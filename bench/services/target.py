"""The target alone, on a CPU: steps against the memory that they must read, and hints against plain decoding.

step   whole engine steps of one session with 1, 8 and 16 rows, by number format of the weights. The floor is the time
       in which as many bytes are read as the weights and the session's keys and values are, in turns with the steps
many   plain decoding of several sessions at once
first  the first token of a short prompt
hints  tokens a second from 1 to 64 sessions: plain, with a good drafter's hints, with a useless one's. Both claim to
       be right nine times in ten; the good one is eight times in ten, the other never. They cost no time of their own
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.flags import whole
from bench.harness.report import Report
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import UNLIMITED_DRAFT, Proposal, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu.bandwidth import Reader
from services.target.kernels.kv_cache import token_bytes
from services.target.model.native import ProgramRunner
from services.target.process.app import build_engine
from services.target.process.warmup import step_by_step
from services.target.speculation.budget import Budget, Selection
from services.target.speculation.mode_policy import ModePolicy

FORMATS = ("float32", "bfloat16", "int8", "int4")
GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 200  # tokens
_SWEPT = 8  # steps, of each kind, for one with caches that something else has swept
_MANY = 8  # sessions that are served together, whatever numbers of them have hints
CLAIMED, GOOD = 0.9, 0.8  # a hint's score, and how often the good drafter's are right
PROPOSED = 8  # tokens of a hint
_RACES = 4
# Seconds. Many sessions begin without hints, for half a minute, and where it is not known yet how often hints are right
# their first trial may lose; the second one comes a quarter of a minute later.
_FEW, _LEARNING_FEW, _LEARNING_MANY = 2, 10.0, 60.0
Hints = Callable[[int, list[int]], Proposal | None]


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/target.*."""
    parser = argparse.ArgumentParser(prog="outrider bench target", description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int8", "int4"])
    parser.add_argument("--sessions", nargs="+", type=whole, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=whole, default=60, help="timed steps of each figure")
    args = parser.parse_args(argv)
    steps = Report("target-steps", "The target on a CPU: steps against their memory floor")
    hints = Report("target-hints", "The target on a CPU: hints against plain decoding")
    threads = torch.get_num_threads()
    for name in args.formats:
        torch.set_num_threads(threads)  # loading a program leaves PyTorch one
        config = config_of(name, max(_MANY, *args.sessions))
        engine = build_engine(checkpoint.resolve(config.model_path), config)
        measure_steps(steps, engine, name, args.steps)
        if name == args.formats[0]:
            rival = TargetEngine(engine.model, config)
            rival.speculation.planner.budget = Budget(copy.deepcopy(engine.speculation.planner.budget.cost))
            for sessions in args.sessions:
                measure_hints(hints, Racer(rival), Racer(engine), sessions, args.steps)
            del rival
    steps.notes += [
        "floor: bytes as many as a step's weights, keys and values, read by all threads in turns with steps; medians",
        "step: one by one; session, sessions: as they are served, a few steps of a burst at a time",
        "of floor: floor / step; against plain: a step with so many rows / one with a single row, taken in turns",
    ]
    hints.notes += [
        f"hints of {PROPOSED} tokens that claim {CLAIMED:.0%} of the time; good: {GOOD:.0%}, useless: never",
        "plain: tokens a second of the engine; two engines of one model, one with hints and one without, take their "
        "steps in turns, so that the machine's moods cancel",
        "at first: while the engine learns what the hints are worth; the others are what it does after "
        f"{_LEARNING_FEW:.0f} seconds of them, {_LEARNING_MANY:.0f} with more than {_FEW} sessions: those begin plain",
    ]
    plot(hints)
    steps.write()
    hints.write()


def config_of(name: str, sessions: int) -> TargetConfig:
    """Flags for the default model with weights in a number format."""
    flags = {"quantization": name} if name.startswith("int") else {"dtype": name}
    return TargetConfig(
        max_running_requests=sessions,
        max_total_tokens=32 * 1024,
        disable_radix_cache=True,
        self_speculation="off",
        **flags,
    )


def opening(session_id: int, prompt: NDArray[np.uint32], new: int) -> OpenSession:
    """A greedy session of a fixed length."""
    return OpenSession(session_id, prompt, len(prompt), GREEDY, StopConditions(new, ignore_eos=True))


def prompt_of(seed: int, length: int) -> NDArray[np.uint32]:
    """Token ids, below 20,000."""
    return np.random.default_rng(seed).integers(300, 20_000, length).astype(np.uint32)


# --- steps ---


def measure_steps(report: Report, engine: TargetEngine, name: str, steps: int) -> None:
    """Rows of one session, several sessions, and the first token."""
    runner = engine.model.runner
    assert isinstance(runner, ProgramRunner), "the floor is that of a compiled program"
    size = runner.weight_bytes + CONTEXT * token_bytes(engine.model.shapes, engine.model.cache_dtype)
    floor = Floor(runner.threads, size)
    counts = (1, 8, 16)
    taken = verified_steps(engine, counts, steps, between=floor.measure)
    for rows, seconds in zip(counts, taken, strict=True):
        report.add(
            weights=name, what=f"step of {rows} rows", ms=1e3 * seconds, **floor.against(seconds),
            **{"against plain": seconds / taken[0], "tokens/s": ""},
        )  # fmt: skip
    floor = Floor(runner.threads, size)
    seconds = many(engine, 1, steps, CONTEXT, floor.measure)
    report.add(
        weights=name, what="1 session, plain", ms=1e3 * seconds, **floor.against(seconds), **{"tokens/s": 1 / seconds}
    )
    seconds = many(engine, _MANY, steps)
    report.add(weights=name, what=f"{_MANY} sessions, plain", ms=1e3 * seconds, **{"tokens/s": _MANY / seconds})
    seconds = min(first_token(engine, seed) for seed in range(5))
    report.add(weights=name, what="first token of a prompt of 48 tokens", ms=1e3 * seconds)


class Floor:
    """The seconds in which some bytes are read, measured in between steps: memory is not always equally fast."""

    def __init__(self, threads: int, size: int) -> None:
        self._reader = Reader(threads)
        self._size = size
        self._rates: list[float] = []  # bytes a second

    def measure(self) -> None:
        """Read once."""
        self._rates.append(self._reader.bandwidth(self._size))

    def against(self, seconds: float) -> dict[str, float]:
        """A report's columns for steps that take so long."""
        rate = float(np.median(self._rates))
        floor = self._size / rate
        return {"floor_ms": 1e3 * floor, "of floor": floor / seconds, "GB/s": rate / 1e9}


class _Everything(Budget):
    def select(self, drafts, *_, **__):  # noqa: ANN001, ANN002, ANN003, ANN202
        return Selection([len(draft) for draft in drafts], 0.0)


def _nothing() -> None:
    pass


def verified_steps(
    engine: TargetEngine,
    counts: Sequence[int],
    steps: int,
    context: int = CONTEXT,
    between: Callable[[], None] = _nothing,
) -> list[float]:
    """Median seconds of steps with some numbers of rows of a session, taken in turns; no draft is ever right.

    context: tokens before the first of the steps; fewer where the steps would not fit behind them. between: called
    before some of them, rarely enough that caches which it sweeps do not count
    """
    budget, most = engine.speculation.planner.budget, engine.speculation.planner.max_tokens
    engine.speculation.planner.budget = _Everything()
    new = len(counts) * (steps + 4) + 4
    prompt = prompt_of(1, min(context, engine.max_session_tokens - new)) % engine.model.vocab_size
    engine.open(opening(1, prompt, new))
    while not engine.step().commits:  # the prompt
        pass
    times: dict[int, list[float]] = {rows: [] for rows in counts}
    with step_by_step(engine):
        for turn in range(len(counts) * (steps + 4)):
            if turn % (_SWEPT * len(counts)) == 0:
                between()
            engine.speculation.planner.max_tokens = rows = counts[turn % len(counts)]
            engine.draft_tree(1).clear()
            for depth in range(rows - 1):
                engine.draft_tree(1).add(depth - 1, 7, 0.0)
            start = time.perf_counter()
            engine.step()
            times[rows].append(time.perf_counter() - start)
    engine.close(1)
    engine.speculation.planner.budget, engine.speculation.planner.max_tokens = budget, most
    return [float(np.median(taken[4:])) for taken in times.values()]


def many(
    engine: TargetEngine, sessions: int, steps: int, context: int = 48, between: Callable[[], None] = _nothing
) -> float:
    """Median seconds of a plain step of so many sessions, as they are served: a few, one behind the other, at a time.

    context: tokens of each session before the first of them. between: as of `verified_steps`
    """
    for i in range(sessions):
        engine.open(opening(i, prompt_of(i, context) % engine.model.vocab_size, steps + 40))
    times = []
    while engine.scheduler.running or engine.scheduler.waiting:
        start = time.perf_counter()
        output = engine.step()
        if len(output.commits) == sessions:
            times.append((time.perf_counter() - start) / output.steps)
            if len(times) % _SWEPT == 0:
                between()
    return float(np.median(times[1:-1]))


def first_token(engine: TargetEngine, seed: int) -> float:
    """Seconds from a prompt's arrival to its first token."""
    start = time.perf_counter()
    engine.open(opening(1, prompt_of(seed, 48), 2))
    while not engine.step().commits:
        pass
    seconds = time.perf_counter() - start
    engine.close(1)
    return seconds


# --- hints ---


def measure_hints(report: Report, plain: Racer, hinted: Racer, sessions: int, steps: int) -> None:
    """Tokens a second with and without hints: while the engine learns what they are worth, and then."""
    new = 4 * steps
    prompts = {i: prompt_of(i, 48) for i in range(1, sessions + 1)}
    texts = race([plain], prompts, new)[0]
    rates: list[float] = []
    ratios: dict[str, float] = {}

    def ratio() -> float:
        said, with_hints = race([plain, hinted], prompts, new)
        assert said == with_hints == texts, "hints never change the text"
        rates.append(plain.rate)
        return hinted.rate / plain.rate

    for kind in ("good", "useless"):
        hinted.learn_anew(hints_of(kind, prompts, texts))
        at_first = ratio()
        while hinted.worked < (_LEARNING_FEW if sessions <= _FEW else _LEARNING_MANY):
            race([hinted], prompts, new)
        then = [ratio() for _ in range(_RACES)]
        ratios |= {f"{kind} / plain": float(np.median(then)), f"{kind}, at first": at_first}
    report.add(sessions=sessions, plain=float(np.median(rates)), **ratios)


class Racer:
    """An engine whose clock stands still while others have their turns.

    said: new tokens. worked: seconds in steps since it learnt anew. rate: tokens a second of the steps in which all
    sessions ran; those that come through sooner leave steps with fewer behind, which say nothing about hints.
    """

    def __init__(self, engine: TargetEngine) -> None:
        self.engine = engine
        self.paths: dict[int, list[int]] = {}
        self.said = 0
        self.rate = 0.0
        self._seconds = 0.0
        self._wanted: dict[int, int] = {}
        self._away, self._left = 0.0, time.perf_counter()
        self.learn_anew(None)

    def learn_anew(self, hints: Hints | None) -> None:
        """Forget what hints were worth, and take others."""
        self.hints = hints
        self.worked = 0.0
        self.engine.forget_measurements()
        self.engine.speculation.policy = ModePolicy(clock=lambda: time.perf_counter() - self._away)

    def begin(self, prompts: dict[int, NDArray[np.uint32]], new: int) -> None:
        """Open the sessions and compute their prompts."""
        self.paths = {i: prompt.tolist() for i, prompt in prompts.items()}
        self._wanted = dict.fromkeys(prompts, UNLIMITED_DRAFT)
        for i, prompt in prompts.items():
            self.engine.open(opening(i, prompt, new))
        while any(len(self.paths[i]) == len(prompts[i]) for i in prompts):
            self.step([])
        self.said, self._seconds = 0, 0.0

    def proposals(self) -> list[Proposal]:
        """What the drafter says at this moment, of those sessions whose hints are wanted."""
        if self.hints is None:
            return []
        hints = [self.hints(i, path) for i, path in self.paths.items() if self._wanted[i]]
        return [hint for hint in hints if hint is not None]

    def step(self, proposals: list[Proposal]) -> None:
        """One turn."""
        start = time.perf_counter()
        self._away += start - self._left
        self.engine._collected += start - self._left  # or it would take others' turns for waits, which nodes may fill
        self.engine.receive(proposals, ())
        output = self.engine.step()
        self._left = time.perf_counter()
        self._seconds += self._left - start
        self.worked += self._left - start
        for commit in output.commits:
            self.paths[commit.session_id] += commit.tokens.tolist()
            self._wanted[commit.session_id] = commit.draft_budget
            self.said += len(commit.tokens)
        if self.engine.scheduler.running == len(self.paths):
            self.rate = self.said / self._seconds


def race(racers: Sequence[Racer], prompts: dict[int, NDArray[np.uint32]], new: int) -> list[dict[int, list[int]]]:
    """New tokens of every session, as each racer says them. Who has said least has the next turn."""
    for racer in racers:
        racer.begin(prompts, new)
    while running := [racer for racer in racers if not racer.engine.idle]:
        racer = min(running, key=lambda racer: racer.said)
        racer.step(racer.proposals())
    return [{i: path[len(prompts[i]) :] for i, path in racer.paths.items()} for racer in racers]


def hints_of(kind: str, prompts: dict[int, NDArray[np.uint32]], texts: dict[int, list[int]]) -> Hints:
    """A drafter that knows the texts, and is right as often as its kind says."""
    rng = np.random.default_rng(0)
    score = np.full(PROPOSED, np.log(CLAIMED), np.float32)

    def hint(session_id: int, path: list[int]) -> Proposal | None:
        done = len(path) - len(prompts[session_id])
        right = np.array(texts[session_id][done : done + PROPOSED], np.uint32)
        if not len(right):
            return None
        wrong = rng.random(len(right)) > (GOOD if kind == "good" else 0.0)
        tokens = np.where(wrong, (right + 1) % 1000, right).astype(np.uint32)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        return Proposal(session_id, len(path), path_hash(np.array(path)), tokens, parents, score[: len(tokens)])

    return hint


def plot(report: Report) -> None:
    """Ratios by sessions."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    sessions = [row["sessions"] for row in report.rows]
    for kind in ("good", "useless"):
        axes.plot(sessions, [row[f"{kind} / plain"] for row in report.rows], marker="o", label=f"{kind} hints")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="sessions", ylabel="tokens a second / plain", ylim=(0, None))
    axes.set_xticks(sessions, [str(n) for n in sessions])
    axes.legend(frameon=False)
    report.save(figure)
    plt.close(figure)
