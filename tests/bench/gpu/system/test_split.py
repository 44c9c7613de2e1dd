"""What a step's time consists of, on recordings whose answer is known."""

import numpy as np
import pytest

from bench.gpu.system import split
from bench.gpu.system.recording import COLUMNS
from bench.gpu.system.split import split_of
from bench.harness.report import new_figure


def rows_of(**kinds):
    return {name: np.array(kinds.get(name, []), float).reshape(-1, columns) for name, columns in COLUMNS.items()}


# Steps of 10 ms: the target launches for 1 ms, computes for 4, is read after 6 and ends after 7. Its commit reaches the
# draft after 1 ms more, which runs a program of 1 ms (0.25 of it dispatch) in a step of 1.5 ms; the proposal needs 0.5.
STARTS = [0.010 * i for i in range(10)]
TARGET = rows_of(
    launch=[(t, t + 0.001, t + 0.002, t + 0.006, 3) for t in STARTS],
    step=[(t - 0.0005, t + 0.007) for t in STARTS],
    read=[(t + 0.002, t + 0.006) for t in STARTS],
    commits=[(t + 0.007, i) for i, t in enumerate(STARTS)],
    proposals=[(t + 0.0100, i) for i, t in enumerate(STARTS)],
)
DRAFT = rows_of(
    step=[(t + 0.008, t + 0.0095) for t in STARTS],
    run=[(t + 0.0083, t + 0.0093, 0.00025) for t in STARTS],
    commits=[(t + 0.008, i) for i, t in enumerate(STARTS)],
    proposals=[(t + 0.0095, i) for i, t in enumerate(STARTS)],
)


def test_parts_of_a_step():
    found = split_of(-0.0005, 0.0995, TARGET, DRAFT, on_cuda=True)
    assert found == pytest.approx((10.0, 4.0, 6.0, 3.5, 0.75, 0.75, 1.5, 3.0), rel=1e-6)
    on_cpu = split_of(-0.0005, 0.0995, TARGET, DRAFT, on_cuda=False)
    assert on_cpu.target_host == pytest.approx(6.5)
    assert split_of(5.0, 6.0, TARGET, DRAFT, on_cuda=True) is None


def test_of_a_computation_that_outlives_the_window_the_part_inside_counts():
    # A client saw a whole answer within 2 ms of a computation that took 6.
    found = split_of(0.0, 0.002, TARGET | {"launch": np.array([(0.001, 0.007, 0.001, 0.007, 0)])}, DRAFT, on_cuda=False)
    assert (found.period, found.target, found.idle) == pytest.approx((2.0, 1.0, 1.0))


def test_a_message_that_waits_for_its_receivers_step_is_not_on_the_wire_meanwhile():
    busy = DRAFT | {"step": np.array([(t + 0.0065, t + 0.0078) for t in STARTS])}
    assert split_of(-0.0005, 0.0995, TARGET, busy, on_cuda=True).wire == pytest.approx(0.7)


def test_steps_without_a_proposal_have_no_wire():
    silent = DRAFT | {"commits": np.empty((0, 2)), "proposals": np.empty((0, 2))}
    assert split_of(-0.0005, 0.0995, TARGET, silent, on_cuda=True).wire is None


def test_the_timeline_shows_device_and_messages():
    axes = new_figure(4, 2).subplots()
    split.draw(axes, -0.001, 0.099, TARGET, DRAFT)
    assert axes.get_yticklabels()[0].get_text() == "target's device"
    assert len(axes.collections) == 4
    assert len(axes.texts) == 8  # a commit and a proposal for each of four steps
