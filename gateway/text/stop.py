"""Stop strings across token borders: a possible beginning of one is held back.

All stop strings of a request are one automaton (Aho-Corasick), which reads each character once, however long the
strings are and however much of them is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request: an automaton of them takes about 4 ms to build
_CACHED = 64  # automatons, because all choices of a request have the same


class _Automaton:
    """The prefixes of some strings as states; state 0 is the empty one.

    A state's transitions are those of the prefix itself. A character without one continues at the state's fallback:
    its longest proper suffix that is a state, too.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.transitions: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ending: list[tuple[int, ...]] = [()]  # numbers of the strings that end at each state
        for number, string in enumerate(strings):
            self._add(number, string)
        self.fallback = [0] * len(self.depth)
        self._connect()
        self.firsts = frozenset(self.transitions[0])

    def _add(self, number: int, string: str) -> None:
        state = 0
        for letter in string:
            following = self.transitions[state].get(letter)
            if following is None:
                following = self.transitions[state][letter] = len(self.depth)
                self.transitions.append({})
                self.depth.append(self.depth[state] + 1)
                self.ending.append(())
            state = following
        self.ending[state] += (number,)

    def _connect(self) -> None:
        """Set the fallbacks, from the short prefixes to the long ones."""
        states = deque(self.transitions[0].values())
        while states:
            state = states.popleft()
            for letter, following in self.transitions[state].items():
                self.fallback[following] = self.after(self.fallback[state], letter)
                self.ending[following] += self.ending[self.fallback[following]]
                states.append(following)

    def after(self, state: int, letter: str) -> int:
        """The state after one more character: the longest end of the text that begins a string."""
        transitions = self.transitions
        while (following := transitions[state].get(letter)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return following


@lru_cache(maxsize=_CACHED)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)


class StopMatcher:
    """Passes text through up to the first stop string.

    stopped, matched: whether a stop string was found, and which
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings."""
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._state = 0
        self._held: deque[str] = deque()
        self._held_length = 0
        self.stopped = False
        self.matched = ""

    def push(self, text: str) -> str:
        """The text that can be sent. Sets `stopped` once a stop string is complete; the text behind it is dropped.

        Of several strings that this text completes, the one that begins first counts.
        """
        automaton, state = self._automaton, self._state
        if not state and automaton.firsts.isdisjoint(text):
            return text
        found: list[tuple[int, int]] = []  # position of a stop string, and its number
        for end, letter in enumerate(text, start=self._held_length + 1):
            state = automaton.after(state, letter)
            found += [(end - len(automaton.strings[number]), number) for number in automaton.ending[state]]
        self._state = state
        self._held.append(text)
        self._held_length += len(text)
        if not found:
            return self._release(self._held_length - automaton.depth[state])
        position, number = min(found)
        self.stopped, self.matched = True, automaton.strings[number]
        sent = self._release(position)
        self.finish()
        return sent

    def _release(self, count: int) -> str:
        """Take the first characters of the text that is held back."""
        self._held_length -= count
        pieces: list[str] = []
        while count > 0:
            piece = self._held.popleft()
            pieces.append(piece[:count])
            if count < len(piece):
                self._held.appendleft(piece[count:])
            count -= len(pieces[-1])
        return "".join(pieces)

    def finish(self) -> str:
        """The text held back, at the end of the answer."""
        self._state = 0
        return self._release(self._held_length)


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`, which must be short."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
