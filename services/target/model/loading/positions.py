"""The context length that a model's configuration allows."""

from __future__ import annotations

from typing import Any

from outrider.errors import ConfigError

# Rotary embeddings that depend on the longest sequence of a batch: one session would change another's text.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_OF_LONGROPE = ("factor", "mscale")  # each in a short_ and a long_ variant


def stretch(text: Any, wanted: int | None) -> None:
    """Use longrope's long factors for every text if the context is long, so that texts do not affect one another."""
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
            continue  # the frequencies do not depend on the length
        if kind in _LENGTH_DEPENDENT:
            longest = usual = min(longest, trained)
            if wanted is not None and wanted > longest:
                raise ConfigError(
                    f"--context-length {wanted}: the model's RoPE changes past {longest} tokens; lower it"
                )
        elif kind == "yarn":  # configurations with added YaRN often keep the original number of positions
            longest = usual = max(longest, int(factor * trained))
        elif kind == "linear":  # the configuration does not state whether its positions are scaled already
            longest = max(longest, int(factor * longest))
    if wanted is not None and not 2 <= wanted <= longest:
        raise ConfigError(f"--context-length must lie in [2, {longest}], the model's positions, not {wanted}")
    return usual if wanted is None else wanted


def _rotations(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
