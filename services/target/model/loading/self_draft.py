"""--self-draft: what a target drafts with by itself, if it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD, has_head
from outrider.errors import ConfigError
from services.target.kernels.cpu.weights import Format
from services.target.model.loading.narrow import cpu_format

_LEAST_BYTES = 32e6  # of linear layers: smaller ones are read from caches, where narrower ones gain nothing


@dataclass(frozen=True)
class Means:
    """prompt_lookup: from what texts repeat; copied: with a copy of the weights in a narrow format; head: with a head.

    Of both, the head guesses for the copy.
    """

    prompt_lookup: bool = False
    copied: Format | None = None
    head: Path | None = None


def own_drafts(config: TargetConfig, module: Any, reason: str | None) -> Means:
    """What a target drafts with. reason: why the model is no compiled program, if it is none. Raises ConfigError."""
    choice, folder = config.self_draft, _head_folder(config)
    if config.self_draft_head is not None and choice not in ("auto", "head", "int4", "int8"):
        raise ConfigError(f"--self-draft-head says what a head drafts with, not {choice}")
    if choice == "off":
        return Means()
    wanted = choice if choice != "auto" else _best(config, folder)
    against = reason
    if against is None and config.verifies_all_draft_tokens:
        against = "--speculative-num-draft-tokens and --speculative-always say what is verified"
    narrower = wanted in ("int4", "int8") and config.quantization not in ("int4", wanted)
    if against is None and choice in ("int4", "int8") and not narrower:
        against = f"with --quantization {config.quantization} the weights are as narrow themselves"
    if against is None and wanted == "head" and folder is None:
        against = "no head comes along for this model; name its folder with --self-draft-head"
    if choice != "auto" and against is not None:
        remedy = "" if "--self-draft-head" in against else "; leave it out"
        raise ConfigError(f"--self-draft {choice}: {against}{remedy}")
    layers = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    small = sum(weight.nbytes for weight in layers) < _LEAST_BYTES
    if against is not None or (choice == "auto" and small and config.self_draft_head is None):
        return Means()
    guessing = choice in ("auto", "head") or config.self_draft_head is not None  # others have the head that they name
    return Means(True, cpu_format(wanted) if narrower else None, folder if guessing else None)


def _best(config: TargetConfig, folder: Path | None) -> str:
    """What is taken if nobody says: measured, see docs/decisions/0021-a-head-in-the-target.md."""
    if config.self_draft_head is not None:
        return "head"
    if config.quantization is None:
        return "int4"
    # Beside weights of eight bits a copy in four saves too little for its own steps.
    return "text" if folder is None else "head"


def _head_folder(config: TargetConfig) -> Path | None:
    if config.self_draft_head is not None:
        return Path(config.self_draft_head).expanduser()
    return DEFAULT_HEAD if has_head(config.model_path) else None
