"""Quantized checkpoints: kept packed if the device and its packages support the format, else unpacked while loading.

`transformers` has a quantizer for each format; most need a GPU and a package of their own. Without these, our own
quantizer replaces it: it converts every stored group of tensors to a plain weight (`checkpoints.dequantize`), layer by
layer and expert by expert as the files are read, so that the model is a plain one in the format of the computation.
With tensor parallelism each rank unpacks whole tensors, because packed ones cannot be cut anywhere, and keeps its part.

A new format needs an entry in `_FORMATS`, and its arithmetic in outrider/checkpoints/dequantize.py.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin

from outrider.checkpoints.dequantize import check_layout, dequantize
from outrider.errors import ConfigError
from services.target.model.parallel.split import shard_of
from services.target.model.stored.checkpoint import FLOAT8, array_of

log = logging.getLogger(__name__)

_METHOD = "outrider"
_FP8_CAPABILITY = (8, 9)
_EXPERTS = 3  # number of dimensions of a parameter that holds all experts of a layer


@dataclass(frozen=True)
class _Format:
    """A published format that we unpack. names: a weight's tensors; packages: what CUDA needs to keep them packed."""

    names: tuple[str, ...]
    packages: tuple[str, ...]


_FORMATS = {
    "fp8": _Format(("weight", "weight_scale_inv", "activation_scale", "weight_scale", "input_scale"), ("kernels",)),
    "gptq": _Format(("qweight", "qzeros", "scales", "g_idx"), ("optimum", "gptqmodel")),
    "awq": _Format(("qweight", "qzeros", "scales"), ("gptqmodel",)),
    "compressed-tensors": _Format(
        ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale",
         "input_zero_point"),
        ("compressed_tensors",),
    ),
}  # fmt: skip
_NEEDS_PACKAGE = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
_INSTEAD = "choose a checkpoint that is not quantized, or one of fp8, GPTQ, AWQ, compressed-tensors or MXFP4"


def prepare(settings: Any, device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a quantized checkpoint. Changes `settings`.

    ranks: tensor-parallel ones. Raises ConfigError for a format that this machine cannot load.
    """
    text, stored = settings.get_text_config(), settings_of(settings)
    if stored is None:
        return {}
    method = _method(stored)
    whole = {"device_map": {"": device}} if ranks == 1 else {}  # `transformers` places the parts of ranks itself
    if method == "mxfp4":
        if device.type == "cpu" or ranks > 1:
            return {"quantization_config": Mxfp4Config(dequantize=True)}
        return whole
    if method in _NEEDS_PACKAGE:
        _check_package(method, device, ranks)
        return whole
    if method not in _FORMATS:
        raise ConfigError(f"weights quantized by {method} are not supported; {_INSTEAD}")
    if _kept(method, device) and (ranks == 1 or (method == "fp8" and _whole_blocks(text, stored, ranks))):
        return whole
    stored["quant_method"] = method
    try:
        check_layout(stored)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_INSTEAD}") from None
    _log_unpacking(method, device, ranks)
    for owner in (settings, text):
        if getattr(owner, "quantization_config", None) is not None:
            owner.quantization_config = {"quant_method": _METHOD, "stored": stored}
    return {}


def _log_unpacking(method: str, device: torch.device, ranks: int) -> None:
    if device.type == "cuda" and ranks > 1:
        log.warning("%s weights are unpacked, which takes memory; --tp-size divides only fp8 in whole blocks", method)
    elif device.type == "cuda":
        wanted = " ".join(_FORMATS[method].packages)
        log.warning("%s weights are unpacked, which takes more memory; to keep them packed, install %s", method, wanted)
    else:
        log.info("%s weights are unpacked as they load", method)


def settings_of(settings: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint; None for a plain one."""
    text = settings.get_text_config()
    stored = getattr(settings, "quantization_config", None) or getattr(text, "quantization_config", None)
    return None if stored is None else dict(stored if isinstance(stored, Mapping) else stored.to_dict())


def _method(stored: Mapping[str, Any]) -> str:
    if stored.get("load_in_4bit") or stored.get("load_in_8bit"):
        return "bitsandbytes"
    method = stored.get("quant_method") or stored.get("quant_algo") or "an unnamed method"
    return str(getattr(method, "value", method)).lower()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _kept(method: str, device: torch.device) -> bool:
    """True if `transformers` can compute with the packed weights on this device."""
    if device.type != "cuda" or method == "compressed-tensors":
        return False
    if method == "fp8" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return False
    return all(_installed(package) for package in _FORMATS[method].packages)


def _whole_blocks(text: Any, stored: Mapping[str, Any], ranks: int) -> bool:
    """True if the blocks that share a scale do not straddle the border between two ranks."""
    block = stored.get("weight_block_size")
    if not block:
        return True

    def number(name: str, otherwise: int = 0) -> int:
        return getattr(text, name, None) or otherwise

    heads, head, values = text.num_attention_heads, number("head_dim"), number("v_head_dim")
    nope = number("qk_nope_head_dim")
    divided = [
        number("intermediate_size"), number("moe_intermediate_size"), heads * head,
        number("num_key_value_heads", heads) * head,
        heads * (nope + number("qk_rope_head_dim")), heads * (nope + values), heads * values,  # of latent attention
    ]  # fmt: skip
    return all(count % (ranks * max(block)) == 0 for count in divided)


def _check_package(method: str, device: torch.device, ranks: int) -> None:
    if ranks > 1:
        raise ConfigError(f"weights quantized by {method} cannot be divided among ranks; leave out --tp-size")
    package = _NEEDS_PACKAGE[method]
    if device.type != "cuda":
        raise ConfigError(f"weights quantized by {method} need --device cuda; {_INSTEAD}")
    if not _installed(package):
        raise ConfigError(f"weights quantized by {method} need a package; `pip install {package}`, or {_INSTEAD}")


class _Unpack(ConversionOps):
    """Converts stored tensors to plain weights, before experts are merged."""

    def __init__(self, quantizer: _Unpacker) -> None:
        self.hf_quantizer = quantizer  # with this name, `transformers` passes the stored tensors without a cast

    def convert(  # type: ignore[override]  # the base class passes its other arguments by keyword only
        self, input_dict: dict[str, Any], *, model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """input_dict: stored tensors, or lists of them, by name. Returns plain weights by their names, or the parts of
        them that this rank holds.
        """
        parameter = model.get_parameter(full_layer_name)
        dtype, shard = parameter.dtype, shard_of(parameter)
        layers: dict[str, dict[str, list[Any]]] = defaultdict(dict)
        for key, value in input_dict.items():
            layer, _dot, name = key.rpartition(".")
            layers[layer][name] = value if isinstance(value, list) else [value]
        if shard is not None and parameter.ndim == _EXPERTS:
            shard = shard.of_matrix(len(layers))
        weights: dict[str, Any] = {}
        for stem, parts in layers.items():
            whole = [
                self.hf_quantizer.unpack(full_layer_name, dict(zip(parts, tensors, strict=True)), dtype)
                for tensors in zip(*parts.values(), strict=True)
            ]
            if shard is not None:
                whole = [shard.part(weight).clone() for weight in whole]
            weights[f"{stem}.weight" if stem else full_layer_name] = whole if stem else whole[0]
        return weights


def _as_whole_tensors(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
    """In the state that `transformers` reads names and shapes from, replace parts of weights by whole tensors."""
    for name, tensor in state.items():
        if not prefix and not name.endswith("bias") and shard_of(tensor) is not None:
            state[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@register_quantization_config(_METHOD)
class _UnpackConfig(QuantizationConfigMixin):
    """Replaces the stored `quantization_config`, which it contains."""

    def __init__(self, stored: Mapping[str, Any], **_: Any) -> None:
        self.quant_method: Any = _METHOD  # `transformers` accepts names of registered methods
        self.stored = dict(stored)
        self.dequantize = True


@register_quantizer(_METHOD)
class _Unpacker(HfQuantizer):
    """Our quantizer: the model is unchanged, and stored tensors become plain ones."""

    def __init__(self, quantization_config: _UnpackConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._stored = quantization_config.stored
        self._failed = False
        names = _FORMATS[self._stored["quant_method"]].names
        self.serialized_names = {"weight": list(dict.fromkeys(("weight", *names)))}

    def unpack(self, name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The plain weight of one layer; that of a layer that is not quantized is only cast. name: for messages."""
        if set(tensors) == {"weight"} and tensors["weight"].dtype not in FLOAT8:
            return tensors["weight"].to(dtype)
        try:
            arrays = {part: array_of(tensor) for part, tensor in tensors.items()}
            device = next(iter(tensors.values())).device  # of a rank: its GPU
            return torch.from_numpy(dequantize(name, arrays, self._stored)).to(device, dtype)
        except Exception as error:
            if not self._failed:  # `transformers` collects failures without their text and continues
                log.error("%s", error)
            self._failed = True
            raise

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        """Let `transformers` read whole tensors for the weights that are unpacked."""
        self._reading = model.register_state_dict_post_hook(_as_whole_tensors)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """The names and shapes are read no more."""
        self._reading.remove()
        return model

    def get_load_operations(self) -> dict[str, Any]:
        """The operation on the stored tensors."""
        return {"dequantize": _Unpack}

    def is_serializable(self) -> bool:
        """As any plain model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """As any plain model."""
        return True
