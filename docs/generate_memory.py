"""Writes docs/memory.md from the plan of GPU memory: `make memory`."""

from __future__ import annotations

from pathlib import Path

from outrider.doctor.table import page

PAGE = Path(__file__).with_name("memory.md")

if __name__ == "__main__":
    PAGE.write_text(page())
