"""What the campaign selects, and what its network does to packets."""

import itertools

import pytest

from bench.harness import report
from tests.chaos.campaign import Result
from tests.chaos.cells import ROLES, SESSIONS, TEMPERATURES, all_cells, head_cells, selected
from tests.chaos.emulator import Rule, Wire
from tests.chaos.faults import FAULTS
from tests.chaos.page import Page


@pytest.mark.parametrize("seed", range(5))
def test_a_selection_has_each_fault_on_each_process_and_each_fault_under_all_loads(seed):
    cells = [cell for cell in selected(seed) if cell.fault != "none"]
    assert {(cell.role, cell.fault) for cell in cells} == set(itertools.product(ROLES, FAULTS.keys() - {"none"}))
    assert len(cells) == len(ROLES) * (len(FAULTS) - 1)
    assert set(cells) <= set(all_cells())
    for fault in FAULTS.keys() - {"none"}:
        assert {cell.sessions for cell in cells if cell.fault == fault} == set(SESSIONS)
        assert {cell.temperature for cell in cells if cell.fault == fault} == set(TEMPERATURES)


def result(cell):
    return Result(cell, equal=cell.sessions)


def test_a_campaign_that_was_interrupted_runs_the_missing_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_folder", tmp_path)
    monkeypatch.setattr(report, "commit", lambda: "abc")
    cells = [*selected(0), *head_cells()]
    calm = [cell for cell in cells if cell.fault == "none" and cell.drafter == "STANDALONE"]

    def page(seed=0):
        return Page(cells, "make chaos", seed=seed, seconds=40.0)

    first = page()
    assert first.resume() == cells
    for cell in cells[:10]:
        first.add(result(cell))
    assert "10 of 45 cells, 0 with a finding" in (tmp_path / "chaos.md").read_text()
    second = page()
    missing = second.resume()
    assert missing == [*calm, *cells[10:]]
    for cell in missing[:-3]:
        second.add(result(cell))
    third = page()
    assert third.resume() == [
        cell for cell in cells if cell.drafter == "EAGLE3" and (cell.fault == "none" or cell in cells[-3:])
    ]
    assert len(third.rows) == len(cells) - 4
    assert len(page(seed=1).resume()) == len(cells)
    monkeypatch.setattr(report, "commit", lambda: "def")
    with pytest.raises(ValueError, match="omit --resume"):
        page().resume()


def arrivals(rule, count=1000, size=100):
    """When packets arrive that leave the target together, or None."""
    wire = Wire(3, {"target": rule})
    return [wire.arrival("target", "gateway", size, 1.0) for _ in range(count)]


def test_a_network_delays_loses_reorders_and_cuts():
    assert arrivals(Rule(), 3) == [1.0] * 3
    assert arrivals(Rule(delay=0.2), 3) == [1.2] * 3
    assert arrivals(Rule(cut=True), 3) == [None] * 3
    assert 20 < arrivals(Rule(loss=0.05)).count(None) < 90
    reordered = arrivals(Rule(reordered=0.3))
    assert 200 < sum(due > 1.0 for due in reordered) < 400
    *slowly, dropped = arrivals(Rule(rate=1000.0), 4)
    assert slowly == pytest.approx([1.1, 1.2, 1.3])
    assert dropped is None


def test_rules_hold_in_both_directions_and_for_no_other_node():
    wire = Wire(3, {"target": Rule(cut=True)})
    assert wire.arrival("gateway", "target", 100, 1.0) is None
    assert wire.arrival("gateway", "draft", 100, 1.0) == 1.0
