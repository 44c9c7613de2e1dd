"""Which speculation mode a step has: selected by trials (selector.py), at each load by itself, once a draft service
answers; before that, the first of the modes that the model and the flags leave open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from services.target.speculation.draft_wait import DraftWait
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.prefill_cost import PrefillCost
from services.target.speculation.modes.selector import ModeSelector
from services.target.speculation.modes.trial import TRIAL, ModeTrial, StepPace, Steps

_UNANSWERED_TRIALS = 2  # trials after which missing proposals are a measurement, too
_MANY = 2  # as of `_load`: three sessions and more

SERVICE_MODES = (*DRAFT_MODES, SpeculationMode.NONE)  # of a target without draft sources of its own
MEASURING_MODES = (SpeculationMode.WAIT_FOR_DRAFT,)


class ModePolicy:
    """Decides for one engine.

    wait:         how long steps are held for proposals
    prefill_cost: of prompts, in modes with drafters and without
    pace:         of steps without prompts
    """

    def __init__(
        self,
        modes: Sequence[SpeculationMode] = SERVICE_MODES,
        clock: Callable[[], float] = time.perf_counter,
        longest: float | None = None,
        expensive: Callable[[], bool] = lambda: False,
        drafts_ahead: Callable[[], bool] = lambda: True,
    ) -> None:
        """modes: those to choose among; the first one begins. longest: as of DraftWait.

        expensive: returns whether draft trees cost so much that few sessions, too, begin without, as many do
        drafts_ahead: returns whether drafters draft while the target computes; others delay a step that does not wait
        """
        self._clock = clock
        self._modes = modes
        self._expensive, self._drafts_ahead = expensive, drafts_ahead
        self.wait = DraftWait(clock, longest)
        # By load: 1, 2, 3 to 5, 6 to 11 sessions, and so on; apart where only the draft service may draft.
        self._selectors: dict[bool, dict[int, ModeSelector]] = {False: {}, True: {}}
        self._served, self._apart = True, False
        self.prefill_cost = PrefillCost()
        self._load = self._present_load = -1  # logarithms of sessions: of those measured, and of those present
        self._trial = ModeTrial()
        self.pace = StepPace()
        self._ended = self._began = clock()

    @property
    def mode(self) -> SpeculationMode:
        """The mode of the next step."""
        return self._selected if self._served else self._alone

    @property
    def _alone(self) -> SpeculationMode:
        """The mode of sessions that allow no draft service."""
        return next((mode for mode in self._modes if mode not in DRAFT_MODES), self._modes[0])

    @property
    def _selected(self) -> SpeculationMode:
        """The mode of sessions that allow the draft service."""
        selector = self.selector
        if selector is None and self._apart:
            return next((mode for mode in self._modes if mode in DRAFT_MODES), self._modes[0])
        return selector.mode if selector is not None else self._modes[0]

    @property
    def selector(self) -> ModeSelector | None:
        """The selector of the present load; None before a drafter answers."""
        return self._selectors[self._apart].get(self._load)

    @property
    def drafting_paused(self) -> bool:
        """True if drafting is paused. Until the first proposal arrives it is not."""
        return self.wait.has_drafter and self._selected not in DRAFT_MODES

    @property
    def without_drafts(self) -> bool:
        """True if no drafter is there, no session allows one, or drafting has been paused for some steps."""
        return not (self.wait.has_drafter and self._served) or (self.drafting_paused and self._trial.steps >= 0)

    def begin(self, sessions: int = 0, *, served: bool = True, apart: bool = False, since: float | None = None) -> None:
        """A step begins. sessions: that are present, those that still have prompts to read included.

        They will all want tokens soon, so it is their load that counts: their prompts are read in the better mode.
        served: a session allows the draft service. apart: no session allows another source, so that the modes without
        a draft service are plain decoding; these are measured apart, and one or two begin with the draft service.
        since: when the device began with the step in flight, if there is one.
        """
        if apart is not self._apart:
            self._load, self._apart = -1, apart
        self._served = served
        now = self._clock()
        self._began = now if since is None else since
        self.wait.begin(now)
        self._present_load = _load(sessions)
        if self._selects and self._present_load > self._load:
            self._change_load(self._present_load)

    @property
    def _selects(self) -> bool:
        """True if there is more than one mode: without a draft service there is not."""
        return self.wait.has_drafter and self._served

    def received(self, session_id: int, *, fresh: bool, length: int = 0, useful: bool = True) -> None:
        """As of DraftWait."""
        if not self.wait.has_drafter:
            self._selectors, self._load = {False: {}, True: {}}, -1
        self.wait.received(session_id, fresh=fresh, length=length, useful=useful)

    def asked(self, lengths: Mapping[int, int], trees: Collection[int] = ()) -> None:
        """As of DraftWait; behind `end`."""
        if self.wait.has_drafter:
            self.wait.asked(lengths, trees)

    def end(
        self,
        wanted: Collection[int],
        count: int,
        tokens: int,
        *,
        prompts: int = 0,
        steps: int = 1,
        own: int = 0,
        drafted: int = 0,
        accepted: int = 0,
        unread: Mapping[int, int] | None = None,
    ) -> None:
        """A step has ended, or several at once, that committed tokens in `count` sessions.

        wanted: those of them whose draft tokens are wanted next. prompts: prompt tokens in it. own: of the tokens,
        draft tokens of the target's own sources. drafted: sessions with draft tokens of a draft service, of which
        `accepted` were accepted. unread: lengths of the wanted sessions that no drafter has answered
        """
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        computing = now - self._began
        if self._selects:
            self.prefill_cost.committed(tokens)
            self._account(count, tokens, prompts, computing, seconds - computing)
            held = max(0.0, min(seconds - computing, self.wait.longest))
            if self.wait.reads:  # no part of a usual step
                self.prefill_cost.held(held)
                seconds, held = computing, 0.0
            load = _load(count)
            if count and (load > self._load or (load < self._load and not prompts and self._present_load < self._load)):
                self._change_load(load)
            elif count and not prompts and self._is_measurement(bool(self.wait.any_of(wanted))):
                share, computed = drafted / count, seconds - held
                new = Steps(
                    tokens / count, seconds, steps, own / count, share, accepted / count, held, share * computed
                )
                self._measure(count, new)
        if count and not prompts:
            self.pace.add(tokens / count / steps, computing / steps)
        hold = self.mode is SpeculationMode.WAIT_FOR_DRAFT
        each = self.prefill_cost.seconds_per_prompt_token
        reading = {one: each * length for one, length in unread.items()} if unread else None
        tries = self._trial.steps < 0 and self.selector is not None and self.selector.probes
        self.wait.end(now, wanted, self.pace.seconds or computing, hold=hold, tries=tries, reading=reading)

    def _account(self, count: int, tokens: int, prompts: int, computing: float, waited: float) -> None:
        """All steps, measured or not, show what trials cost and when the next are due. computing, waited: seconds."""
        selector = self.selector
        if prompts:
            # Beside prompts there may be no draft tokens, so it is the step's tokens that take the time of others.
            others = self.pace.seconds_of(tokens / count) if tokens else 0.0
            self.prefill_cost.observe(self.mode, prompts, max(0.0, computing - others))
            if selector is not None:
                selector.add_prefill(computing)
        elif count and selector is not None:
            selector.add_step(tokens / count, computing + min(waited, self.wait.longest))

    def _is_measurement(self, drafted: bool) -> bool:
        # A drafter that has not answered a session yet may have its prompt to read: that is no measurement of its
        # draft tokens, unless it goes on like that.
        if drafted or self.mode not in DRAFT_MODES:
            return True
        self._trial.unanswered += 1
        return self._trial.unanswered > _UNANSWERED_TRIALS * TRIAL

    def _change_load(self, load: int) -> None:
        """Go on at another load."""
        mode, self._load = self._selected, load
        known = self._selectors[self._apart]
        self._trial.forget_usual()
        self._trial.start(settles=load not in known)
        if load not in known:
            below = max((other for other in known if other < load), default=-1)
            # The first trial at a larger load costs as much where the draft service alone may draft.
            fewer, many = known.get(below), load >= _MANY or (not self._apart and self._expensive())
            known[load] = ModeSelector(
                self._modes, mode, self.prefill_cost, fewer, load - below, latency=self.wait.latency, many=many,
                drafts_ahead=self._drafts_ahead,
            )  # fmt: skip

    def _measure(self, count: int, new: Steps) -> None:
        trial, selector = self._trial, self._selectors[self._apart][self._load]
        late = self.wait.latency.seconds / self.pace.seconds if self.mode in DRAFT_MODES and self.pace.seconds else 0.0
        trial.add(self.mode, new, int(late))
        if trial.steps > 0 and (trial.steps >= selector.steps or selector.hopeless(trial.total)):
            before = selector.mode
            selector.end_trial(trial.total, count)
            trial.start(settles=selector.mode is not before)


def _load(sessions: int) -> int:
    """Loads differ by the logarithm of their sessions; -1 is none."""
    return round(math.log2(sessions)) if sessions else -1
