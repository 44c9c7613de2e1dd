"""The page with the results, which a later run of the campaign can complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.harness import report
from tests.chaos.campaign import Result
from tests.chaos.cells import Cell
from tests.chaos.system import Levels

_NAME = "chaos"


class Page:
    """The page, written after each cell. results: of this run; rows: those of the run that it resumes, too."""

    def __init__(self, cells: Sequence[Cell], command: str, *, seed: int, seconds: float, kept: bool = True) -> None:
        """cells: that the page is to have. command: that makes it. kept: False writes no page"""
        self._places = {tuple(cell.columns.values()): place for place, cell in enumerate(cells)}
        self._cells, self._command = cells, command
        self._seed, self._seconds, self._kept = seed, seconds, kept
        self.results: list[Result] = []
        self.rows: list[dict[str, Any]] = []

    def resume(self) -> Sequence[Cell]:
        """Take over the rows of the last run with these settings. Returns the cells that are to run.

        Raises ValueError if that run was of another commit or machine.
        """
        rows = report.rows_to_resume(_NAME, lambda notes: notes[:-1] == self._notes())
        known = {self._key(row): row for row in rows if self._key(row) in self._places}
        lacking = [cell for cell in self._cells if tuple(cell.columns.values()) not in known]
        systems = {cell.drafter for cell in lacking if cell.fault != "none"}
        # Undisturbed cells run again, because the levels that the others leave are compared with theirs.
        missing = [
            cell for cell in self._cells if cell.drafter in systems and (cell in lacking or cell.fault == "none")
        ]
        for cell in missing:
            known.pop(tuple(cell.columns.values()), None)
        self.rows = list(known.values())
        return missing

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._cells[0].columns)

    def add(self, result: Result) -> None:
        """Add a result, and write the page."""
        self.results.append(result)
        self.rows.append(result.row())
        self.rows.sort(key=lambda row: self._places[self._key(row)])
        if not self._kept:
            return
        wrong = sum(row["levels"] != "returned" for row in self.rows)
        summary = f"{len(self.rows)} of {len(self._cells)} cells, {wrong} with a finding"
        notes = [*self._notes(), summary]
        page = report.Report(_NAME, "Faults: texts and recovery", command=self._command, notes=notes)
        page.rows = self.rows
        known = [one.levels for one in self.results if one.levels is not None]
        if known:
            page.more = [("Levels after the first and the last cell of a run", _level_rows(known[0], known[-1]))]
        page.write()

    def _notes(self) -> list[str]:
        return [
            f"Seed {self._seed}; two gateway workers. STANDALONE and NGRAM: a small random model as a target slowed "
            "down, its fast twin as the draft. EAGLE3: a small target slowed down that walks through a cycle of "
            "tokens, with a head that knows the cycle",
            "The fault begins when a quarter of all tokens has arrived. Equal texts: those with the tokens of an "
            "undisturbed run that decoded plainly. Asked again: streams that ended with their gateway worker, which a "
            "client repeats; what they had was the beginning of the same text",
            f"SIGSTOP and network cut last {self._seconds:g} s. Half-open: the process is killed behind a cut of "
            "6 s; its peers see no end of their connections. Disk full: the process starts anew with an empty cache "
            "and no room. Clock step: an hour forwards, and back a second later. Slow reader: half of the clients do "
            "not read for 8 s, or the service's network takes 6 kB/s for as long",
            "Longest pause: of a stream between two tokens, from the fault on; of slow readers, the others. Whole "
            "again: seconds until all processes run and are connected, and a new request has its text with accepted "
            "draft tokens; from a kill, or from the end of a fault without one",
            "Levels: leased pages, open sessions, open files and resident memory of each process are what undisturbed "
            "loads leave, at most 45 s later",
            "The delay is each way. Delay, loss and reordering last until all streams have ended; a program in user "
            "space carries the packets between the processes' network namespaces",
        ]


def _level_rows(first: Levels, last: Levels) -> list[dict[str, object]]:
    return [
        {
            "process": role, "memory first, MB": first.memory[role], "memory last, MB": last.memory[role],
            "open files first": first.files[role], "open files last": last.files[role],
        }
        for role in first.memory
    ]  # fmt: skip
