"""How far a model's positions reach, by its configuration."""

from __future__ import annotations

from typing import Any

from outrider.errors import ConfigError

# RoPE whose frequencies change with the longest sequence of a batch: one session would change another's text.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_OF_LONGROPE = ("factor", "mscale")  # for short texts and for long ones


def stretch(text: Any, wanted: int | None) -> None:
    """Have longrope turn every text as a long one if some are to be, so that no text depends on another's length."""
    for rope in _rotations(text):
        trained = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and wanted is not None and trained and wanted > trained:
            rope |= {f"short_{of}": rope[f"long_{of}"] for of in _OF_LONGROPE if f"long_{of}" in rope}


def context_length(text: Any, wanted: int | None) -> int:
    """Longest sequence, in tokens. Raises ConfigError for a length that would change other sessions' text."""
    longest = usual = int(
        getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or wanted or 2048
    )
    for rope in _rotations(text):
        kind, factor = rope.get("rope_type"), float(rope.get("factor") or 1.0)
        trained = int(rope.get("original_max_position_embeddings") or longest)
        if kind == "longrope" and all(rope.get(f"short_{of}") == rope.get(f"long_{of}") for of in _OF_LONGROPE):
            continue  # it changes nothing
        if kind in _LENGTH_DEPENDENT:
            longest = usual = min(longest, trained)
            if wanted is not None and wanted > longest:
                raise ConfigError(
                    f"--context-length {wanted}: the model's RoPE changes past {longest} tokens; lower it"
                )
        elif kind == "yarn":  # who adds it to a configuration often leaves its positions as they were
            longest = usual = max(longest, int(factor * trained))
        elif kind == "linear":  # nothing says whether the positions have been multiplied
            longest = max(longest, int(factor * longest))
    if wanted is not None and not 2 <= wanted <= longest:
        raise ConfigError(f"--context-length must lie in [2, {longest}], the model's positions, not {wanted}")
    return usual if wanted is None else wanted


def _rotations(text: Any) -> list[dict[str, Any]]:
    """The parameters of RoPE of each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
