"""The type of a model's parameters."""

from __future__ import annotations

from typing import Any

Params = dict[str, Any]
"""Parameters by name: arrays, matrices (model/matrices), lists of such dictionaries (`layers`), or further ones."""
