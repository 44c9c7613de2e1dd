"""--self-speculation: the draft sources in the target process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD, has_bundled_head
from outrider.errors import ConfigError
from services.target.kernels.cpu.matrices.weights import Format
from services.target.model.loading.weight_quantization import cpu_format
from services.target.model.stored.source import WeightSource

# Bytes of linear layers; smaller layers stay in CPU caches, where narrower weights are no faster.
_MIN_BYTES = 32e6
_COPIED_BITS = {"int4": 5.0, "int8": 8.0}  # of a weight of a copy
_NARROWER = 0.8  # most bits of a copy, over those of the weights, with which it saves time


@dataclass(frozen=True)
class SelfSpeculationPlan:
    """The draft sources that are loaded: prompt lookup, and at most one of the others.

    copied: format of the quantized copy of the weights; head: folder of the local EAGLE head
    """

    prompt_lookup: bool = False
    copied: Format | None = None
    head: Path | None = None


def plan_self_speculation(
    config: TargetConfig, module: Any, reason: str | None, weights: WeightSource | None = None
) -> SelfSpeculationPlan:
    """The draft sources of a model. Raises ConfigError for flags that do not fit together, or not the model.

    reason: why the model does not run as a compiled program; None if it does. weights: as of `choose_runner`
    """
    narrow = config.quantization is not None or (weights is not None and bool(weights.kinds))
    source, folder = config.self_speculation, _head_folder(config)
    _check_flags(config)
    if source == "off":
        return SelfSpeculationPlan()
    wanted = source if source != "auto" else _best_source(config, folder, narrow=narrow)
    number_format: Literal["int4", "int8"] = (
        "int4" if config.self_speculation_format == "auto" else config.self_speculation_format
    )
    against = reason
    if against is None and config.verifies_all_draft_tokens:
        against = "--speculative-num-draft-tokens and --speculative-always fix what is verified"
    if against is None and source == "quantized" and config.quantization in ("int4", number_format):
        against = f"with --quantization {config.quantization} the weights are as narrow as a copy in {number_format}"
    if against is None and source == "quantized" and weights is not None and weights.kinds:
        bits = _bits(module, weights)
        if _COPIED_BITS[number_format] > _NARROWER * bits:
            against = f"the weights of the file have {bits:.1f} bits, which a copy in {number_format} hardly saves"
    if against is None and wanted == "head" and folder is None:
        against = "this model has no bundled head; name a folder with --self-speculation-head"
    if source != "auto" and against is not None:
        remedy = "" if "--self-speculation-head" in against else "; leave it out"
        raise ConfigError(f"--self-speculation {source}: {against}{remedy}")
    layers = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    small = sum(weight.nbytes for weight in layers) < _MIN_BYTES
    if against is not None or (source == "auto" and small and config.self_speculation_head is None):
        return SelfSpeculationPlan()
    if wanted == "quantized":
        return SelfSpeculationPlan(True, copied=cpu_format(number_format))
    return SelfSpeculationPlan(True, head=folder if wanted == "head" else None)


def _check_flags(config: TargetConfig) -> None:
    source = config.self_speculation
    if config.self_speculation_head is not None and source in ("off", "lookup", "quantized"):
        raise ConfigError(f"--self-speculation-head is not for --self-speculation {source}; leave one of them out")
    if config.self_speculation_format != "auto" and source in ("off", "lookup", "head"):
        raise ConfigError(f"--self-speculation-format is not for --self-speculation {source}; leave one of them out")


def _bits(module: Any, weights: WeightSource) -> float:
    """Bits of a weight of the linear layers, without the LM head, on average."""
    head = module.lm_head
    layers = {f"{name}.weight": layer for name, layer in module.named_modules()
              if isinstance(layer, nn.Linear) and layer is not head}  # fmt: skip
    numbers = {name: layer.weight.numel() for name, layer in layers.items()}
    return sum(weights.bits(name) * count for name, count in numbers.items()) / max(1, sum(numbers.values()))


def _best_source(config: TargetConfig, folder: Path | None, *, narrow: bool) -> str:
    """The source for `auto`, from measurements: docs/decisions/0021-local-eagle-head.md.

    narrow: the weights have 8 bits or fewer
    """
    if config.self_speculation_head is not None:
        return "head"
    if not narrow:
        return "quantized"
    # A copy in 4 bits of weights in 8 bits saves less time than its own steps take.
    return "lookup" if folder is None else "head"


def _head_folder(config: TargetConfig) -> Path | None:
    if config.self_speculation_head is not None:
        return Path(config.self_speculation_head).expanduser()
    return DEFAULT_HEAD if has_bundled_head(config.model_path) else None
