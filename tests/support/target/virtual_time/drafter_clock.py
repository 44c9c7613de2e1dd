"""A simulated clock, and steps of a mode policy with a drafter on it."""

from services.target.speculation.modes.mode import SpeculationMode


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(clock, policy, steps, *, answer, gain, step=0.030, drafting=0.0, sessions=1):
    """Steps of a session whose proposals take `answer` seconds and, if awaited, add `gain` tokens. Returns waits.

    drafting: seconds by which a drafter on the same machine slows a step.
    """
    waits = []
    for _ in range(steps):
        waited = min(policy.wait.remaining, answer)
        fresh = waited == answer and policy.wait.remaining > 0
        clock.now += waited
        drafted = policy.mode is not SpeculationMode.NONE
        if drafted:
            policy.received(1, fresh=fresh)
        waits.append(waited)
        policy.begin()
        clock.now += step + drafting * drafted
        policy.end([1] if drafted else [], sessions, sessions * (1 + gain if fresh and drafted else 1))
    return waits
