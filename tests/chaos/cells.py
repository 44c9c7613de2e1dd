"""The cells of the campaign, and which of them a run selects."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tests.chaos.faults import FAULTS

ROLES = ("draft", "target", "gateway")
TEMPERATURES = (0.0, 0.8)
SESSIONS = (1, 8, 64)
TOKENS = {1: 240, 8: 200, 64: 80}  # of each session: some seconds of the small model


@dataclass(frozen=True)
class Cell:
    """One fault, on one process, under one load."""

    role: str
    fault: str
    temperature: float
    sessions: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role}, {self.fault}, T={self.temperature:g}, {self.sessions} sessions"


def all_cells() -> list[Cell]:
    """The whole matrix: an undisturbed cell for each load, then the faults."""
    loads = list(itertools.product(TEMPERATURES, SESSIONS))
    calm = [Cell("-", "none", *load) for load in loads]
    pairs = itertools.product((name for name in FAULTS if name != "none"), ROLES)
    return calm + [Cell(role, fault, *load) for fault, role in pairs for load in loads]


def selected(seed: int) -> list[Cell]:
    """Each fault on each process once. The loads are dealt out so that each fault meets both temperatures and all
    numbers of sessions; which process has which depends on the seed."""
    dice = random.Random(seed)
    cells = [cell for cell in all_cells() if cell.fault == "none"]
    for fault in FAULTS:
        if fault == "none":
            continue
        sessions = dice.sample(SESSIONS, len(SESSIONS))
        temperatures = dice.sample((*TEMPERATURES, dice.choice(TEMPERATURES)), len(ROLES))
        cells += [Cell(*one) for one in zip(ROLES, itertools.repeat(fault), temperatures, sessions, strict=False)]
    return cells
