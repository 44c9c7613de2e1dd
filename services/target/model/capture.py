"""Capture of hidden states of a `transformers` model, by hooks that exist only during a forward pass that captures.

`services.target.step.batch.Capture` defines the states and their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from services.target.step.batch import Capture
from services.target.step.upload import upload


class HiddenStateHooks:
    """Hooks for a model's hidden states. Raises ConfigError for a model without a list of decoder layers."""

    def __init__(self, module: Any) -> None:
        """module: a causal LM of `transformers`."""
        self._decoder: nn.Module = module.get_decoder()
        count = module.config.get_text_config().num_hidden_layers
        lists = [child for child in self._decoder.children() if isinstance(child, nn.ModuleList)]
        layers = next((child for child in lists if len(child) == count), None)
        if layers is None:
            raise ConfigError(f"{type(module).__name__} has no list of {count} layers; its features cannot be taken")
        self._layers = layers

    @contextlib.contextmanager
    def capturing(self, capture: Capture) -> Iterator[list[Tensor]]:
        """Forward passes inside append the states of `capture.rows` to the list, as computed, [F, H] each."""
        states: list[Tensor] = []
        rows: Tensor | None = None
        if capture.rows is not None:
            [rows] = upload([capture.rows], next(self._decoder.parameters()).device)

        def take(state: Tensor) -> None:
            states.append(state[0] if rows is None else state[0].index_select(0, rows))

        def entering(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            take(arguments[0] if arguments else keywords["hidden_states"])

        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            take(output if isinstance(output, Tensor) else output[0])

        handles = [
            self._layers[layer].register_forward_pre_hook(entering, with_kwargs=True)
            if layer < len(self._layers)
            else self._layers[-1].register_forward_hook(leaving)
            for layer in capture.layers
        ]
        if capture.final:
            handles.append(self._decoder.register_forward_hook(leaving))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


def joined(states: list[Tensor]) -> Tensor:
    """States side by side, lowest layer first. [F, W]."""
    return states[0] if len(states) == 1 else torch.cat(states, dim=-1)
