"""What changes with each constant of the estimates."""

import numpy as np

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.calibration import Calibration
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.estimates.wait_gain import WaitGain
from tests.support.constants import constant_tests

PACKAGE = "services.target.speculation.estimates"


def corrected_cost():
    """Seconds of steps by tokens, after steps of one token turned out twice as fast and larger ones slow."""
    cost = StepCost({1: 0.010, 8: 0.012, 64: 0.050})
    for number in range(121):
        tokens, seconds = (1, 0.005) if number < 60 else (8, 0.1)
        cost.observe(tokens, 0, seconds)
    return cost.seconds(np.array([1, 8, 64])).tolist()


def fitted_cost(outlier=1.0):
    """Both parts of a linear cost, after drafting became faster. outlier: factor of one measurement."""
    cost = LinearCost(0.010, 0.002)
    for number in range(40):
        count = 1 + number % 4
        cost.observe(count, (0.020 if number < 20 else 0.005) + 0.001 * count)
    cost.observe(2, outlier * cost.seconds(2))
    return cost.fixed, cost.each


def frozen_slope():
    """The slope of a linear cost, after many measurements of the same count while seconds rose."""
    cost = LinearCost(0.010, 0.002)
    for number in range(600):
        cost.observe(3, 0.010 + 0.0001 * number)
    return cost.each


def measured_calibration(*steps):
    """The ratio after some steps, each with a number, promised draft tokens and accepted ones."""
    calibration = Calibration()
    for count, promised, accepted in steps:
        for _ in range(count):
            calibration.observe(promised, accepted)
    return calibration.ratio


def tries():
    """The steps in which a rejected drafter is tried."""
    calibration, steps = Calibration(), []
    calibration.observe(3.0, 2)  # from here on the first interval counts
    for step in range(2000):
        due = calibration.due
        steps += [step] * due
        calibration.observe(0.9 * due, 0)
    return steps


def measured_latency(*delays, weight=1):
    """Mean seconds of answers, each delay `weight` times, and their number."""
    latency = AnswerLatency()
    for number, delay in enumerate(np.repeat(delays, weight).tolist()):
        latency.asked(1, number, 0.0, held=False)
        latency.answered(1, number, delay)
    return latency.seconds, latency.count


def limit_of_waiting(*intervals, accepted=(2,), seconds=0.003):
    """What the present trees may promise for a wait to pay, in hundredths of a token.

    intervals: between commits; seconds: of an answer
    """
    latency = AnswerLatency()
    gain, now = WaitGain(latency), 0.0
    for number in range(40):
        latency.asked(1, number, now, held=True)
        latency.answered(1, number, now + seconds)
        gain.answered(1)
        now += intervals[number % len(intervals)]
        taken = accepted[number * len(accepted) // 40]
        gain.committed(now, {1: taken}, taken + 1)
    return sum(bool(gain.worth({1: hundredth / 100}, 0.02)) for hundredth in range(400))


def steps_before_hope():
    """Steps without an answer after which a draft that was useless is waited for again, and tokens that may survive."""
    latency = AnswerLatency()
    gain = WaitGain(latency)
    for number in range(40):
        latency.asked(1, number, 0.0, held=True)
        latency.answered(1, number, 0.003)
        gain.answered(1)
        gain.committed(0.02 * number, {1: 0}, 1)
    for number in range(40, 200):
        gain.committed(0.02 * number, {}, 1)
        if gain.worth({1: 0.0}, 0.02):
            return number, sum(bool(gain.worth({1: hundredth / 100}, 0.02)) for hundredth in range(400))
    raise AssertionError("it is never waited for")


def steps_before_judgement():
    """Steps after which a wait that does not pay is recognized."""
    latency = AnswerLatency()
    gain = WaitGain(latency)
    for number in range(100):
        latency.asked(1, number, 0.0, held=True)
        latency.answered(1, number, 0.1)
        gain.answered(1)
        gain.committed(0.02 * number, {1: 0}, 1)
        if not gain.worth({1: 0.0}, 0.02):
            return number
    raise AssertionError("it is never recognized")


def calibrated(accepted, rejected):
    """Acceptance rate of a bin after accepted, and then rejected draft tokens."""
    bins = CalibrationBins()
    for number in range(accepted + rejected):
        bins.observe(0.5, accepted=number < accepted, greedy=True)
    return bins.rate(0.5, greedy=True)


EFFECTS = {
    "step_cost:DECAY": corrected_cost,
    "step_cost:PRIOR": corrected_cost,
    "step_cost:MAX_EXCESS": corrected_cost,
    "step_cost:_INTERVAL": corrected_cost,
    "linear_cost:_ENDS": fitted_cost,
    "linear_cost:_MIN_VARIANCE": frozen_slope,
    "acceptance:DECAY": lambda: measured_calibration((100, 1.2, 1), (20, 1.2, 0)),
    "acceptance:PRIOR_WEIGHT": lambda: measured_calibration((1, 0.9, 0)),
    "calibration:_DECAY_AFTER_PAUSE": lambda: measured_calibration((100, 1.2, 0), (60, 0.0, 0), (1, 0.9, 1)),
    "calibration:_MIN_RATIO": lambda: measured_calibration((500, 20.0, 0)),
    "calibration:_MAX_RATIO": lambda: measured_calibration((500, 0.5, 3)),
    "calibration:_FIRST_INTERVAL": tries,
    "calibration:_MAX_INTERVAL": tries,
    "answer_latency:PAUSE": lambda: measured_latency(0.4, 0.8, 1.6, 3.0),
    "average:WEIGHT": lambda: measured_latency(0.1, 0.01, weight=8),
    "average:SLOW_WEIGHT": lambda: limit_of_waiting(0.02, accepted=(4, 1)),
    "wait_gain:_STALE": steps_before_hope,
    "wait_gain:_HOPED": steps_before_hope,
    "wait_gain:_LEAST": steps_before_judgement,
    "calibration_bins:_DECAY": lambda: calibrated(500, 100),
}
FIXED = {"calibration_bins:BINS": "the compiled kernels have as many"}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(
    {PACKAGE: EFFECTS}, {PACKAGE: FIXED}, whole=[PACKAGE]
)
