"""When the step behind one in flight is launched: late, so that proposals that arrive meanwhile can be verified by it,
but early enough for the device to find it when the step in flight ends."""

from __future__ import annotations

_WEIGHT = 0.2  # of the last step in averages
_LAUNCHES = 2.0  # a launch begins this many usual launches before the device needs it ...
_MAX_EXCESS = 2.0  # a step that takes longer than this many usual ones, as beside another process, counts as this many
_MARGIN = 3e-4  # ... and this many seconds, for a host that wakes up late


class LaunchClock:
    """Averages of one engine. read: when its last step was read, by the clock."""

    def __init__(self) -> None:
        self.read = 0.0
        self._launch = 0.0  # seconds of the host for a prepared step
        self._ratio = 1.0  # time between two steps over what the cost model expects of the second one

    def began(self, launched: float) -> float:
        """When the device began with a step: at its launch, or when it had finished the one before."""
        return max(launched, self.read)

    def launched(self, seconds: float) -> None:
        """The host launched a prepared step."""
        self._launch += (_WEIGHT if self._launch else 1.0) * (seconds - self._launch)

    def collected(self, seconds: float, expected: float) -> None:
        """A step that was launched behind another was read. seconds: since the other was."""
        self._ratio += _WEIGHT * (min(seconds / expected, _MAX_EXCESS * self._ratio) - self._ratio)

    def due(self, began: float, expected: float) -> float:
        """When to launch the step behind one. began: when the device began with it; expected: its seconds.

        A launch that comes too late leaves the device idle and the measured step longer, so the next one would come
        later still. The margin prevents that: it makes launches earlier as long as steps are longer than the device
        needs.
        """
        return began + self._ratio * expected - _LAUNCHES * self._launch - _MARGIN
