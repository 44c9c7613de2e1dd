"""Environment variables of SGLang: what they ask for, and what happens here."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ConfigError

_OVERLAP = "SGLANG_ENABLE_SPEC_V2"
_GREEDY = "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"
_PREFIXES = ("SGLANG_", "SGL_JAX_")
_FALSE = ("", "0", "false", "no", "off")


def environment_notes(environ: Mapping[str, str], algorithm: str, topk: int | None) -> list[str]:
    """A note for each variable of SGLang that is set. Raises ConfigError for more than one branch with overlap.

    topk: --speculative-eagle-topk
    """
    notes = []
    if _is_on(environ, _OVERLAP):
        if algorithm != "NGRAM" and topk is not None and topk > 1:
            raise ConfigError(
                f"{_OVERLAP} needs --speculative-eagle-topk 1, as in SGLang, not {topk}; set it to 1, or unset the "
                "variable: steps overlap here with any tree"
            )
        notes.append(f"{_OVERLAP} has no effect: steps overlap wherever they can, see --disable-overlap-schedule")
    if _is_on(environ, _GREEDY):
        notes.append(
            f"{_GREEDY} has no effect: verification never changes a text, so that sampled requests stay sampled; "
            "temperature 0 gives greedy ones"
        )
    others = sorted(name for name in environ if name.startswith(_PREFIXES) and name not in (_OVERLAP, _GREEDY))
    if others:
        notes.append(f"variables of SGLang that are not read: {', '.join(others)}")
    return notes


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _FALSE
