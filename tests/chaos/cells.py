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
    """One fault, on one process, under one load. drafter: of the system that it runs on"""

    role: str
    fault: str
    temperature: float
    sessions: int
    drafter: str = "STANDALONE"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role}, {self.fault}, T={self.temperature:g}, {self.sessions} sessions, {self.drafter}"

    @property
    def columns(self) -> dict[str, object]:
        """The columns of the table that say which cell a row is of."""
        return {
            "drafter": self.drafter, "process": self.role, "fault": self.fault, "T": self.temperature,
            "sessions": self.sessions,
        }  # fmt: skip


def all_cells(drafter: str = "STANDALONE") -> list[Cell]:
    """The whole matrix: an undisturbed cell for each load, then the faults."""
    loads = list(itertools.product(TEMPERATURES, SESSIONS))
    calm = [Cell("-", "none", *load, drafter) for load in loads]
    pairs = itertools.product((name for name in FAULTS if name != "none"), ROLES)
    return calm + [Cell(role, fault, *load, drafter) for fault, role in pairs for load in loads]


def head_cells() -> list[Cell]:
    """Faults that meet a head, whose drafting needs the hidden states that the target sends."""
    return [
        Cell(role, fault, temperature, 8, "EAGLE3")
        for role, fault, temperature in (
            ("-", "none", 0.0),
            ("draft", "SIGKILL", 0.8),
            ("target", "SIGKILL", 0.0),
            ("gateway", "SIGKILL", 0.8),
            ("draft", "slow reader", 0.0),
            ("target", "5 % loss", 0.8),
        )
    ]


def selected(seed: int, drafter: str = "STANDALONE") -> list[Cell]:
    """Each fault on each process once. The loads are dealt out so that each fault meets both temperatures and all
    numbers of sessions; which process has which depends on the seed."""
    dice = random.Random(seed)
    cells = [cell for cell in all_cells(drafter) if cell.fault == "none"]
    for fault in FAULTS:
        if fault == "none":
            continue
        sessions = dice.sample(SESSIONS, len(SESSIONS))
        temperatures = dice.sample((*TEMPERATURES, dice.choice(TEMPERATURES)), len(ROLES))
        cells += [
            Cell(role, fault, temperature, count, drafter)
            for role, temperature, count in zip(ROLES, temperatures, sessions, strict=True)
        ]
    return cells
