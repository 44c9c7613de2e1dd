"""Launches behind a step in flight come late, but the device does not run dry."""

import pytest

from services.target.engine.launching.launch_clock import LaunchClock


@pytest.mark.parametrize("believed", [0.3, 1.0, 3.0])
def test_the_device_is_kept_busy_whatever_the_cost_model_believes(believed):
    """A simulated device of 4 ms a step, and a host that needs 1 ms for a launch."""
    device, host = 4e-3, 1e-3
    clock, began, idle, early = LaunchClock(), 0.0, [], []
    for _ in range(60):
        ends = began + device
        launch = max(clock.due(began, believed * device), began)
        clock.launched(host)
        following = max(ends, launch + host)
        clock.collected(following - began, believed * device)
        idle.append(following - ends)
        early.append(ends - launch - host)
        began = following
    assert max(idle[-20:]) == 0.0
    assert max(early[-20:]) < 2e-3  # what arrives in the first half of a step is verified by the next
