"""A forward pass of one token that shows what each layer of a model stores and how it attends.

It needs shapes alone, so it also works with a model without weights, whose modules are on the meta device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.initialization import no_init_weights

from outrider.errors import ConfigError
from services.target.model import attention
from services.target.model.loading import support


def module_without_weights(settings: Any, dtype: torch.dtype) -> Any:
    """The model that a configuration describes, on the meta device."""
    with torch.device("meta"), no_init_weights():
        module = support.auto_class(settings).from_config(
            settings, dtype=dtype, attn_implementation=attention.registered()
        )
    module.tie_weights()
    return module.eval().requires_grad_(False)


def make_rotary_buffers(module: Any) -> None:
    """Give a dense decoder without weights the buffers of its rotary embedding, which are no part of a checkpoint."""
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config)


@torch.inference_mode()
def pass_a_token(module: Any, device: torch.device) -> attention.Probe:
    """Probe a model with one token. Raises ConfigError if the paged cache cannot serve it."""
    probe = attention.Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with attention.probing(probe):
        try:
            output = module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=token[0])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(module).__name__} cannot be called as needed: {support.first_line(error)}"
            ) from error
    text = module.config.get_text_config()
    layers = text.num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise ConfigError(
            f"{type(module).__name__}: {len(probe.shapes)} of {layers} layers use the attention interface of "
            "transformers; the others cannot be served from a paged cache"
        )
    if output.logits.shape[:2] != (1, 1):
        raise ConfigError(f"{type(module).__name__} cannot compute the logits of chosen rows alone")
    kinds = getattr(text, "layer_types", None) or ()
    for layer, kind in enumerate(kinds[:layers]):
        if kind == "sliding_attention" and probe.windows[layer] is None:
            raise ConfigError(f"{type(module).__name__} does not say how wide the window of layer {layer} is")
    return probe


def check_window(module: Any, probe: attention.Probe, context_length: int) -> None:
    """Raise ConfigError for a model whose mask has a window that it does not pass to its attention, as PhiMoE."""
    text = module.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    masks = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    if not window or not masks or getattr(text, "layer_types", None) or any(probe.windows.values()):
        return
    if window < context_length:
        raise ConfigError(
            f"{type(module).__name__} does not pass its attention its window of {window} tokens; "
            f"choose --context-length {window} or less"
        )
