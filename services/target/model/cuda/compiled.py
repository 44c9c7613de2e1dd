"""torch.compile for the layers of a model: one program for each kind of layer and captured number of rows.

Only steps with inputs at fixed addresses (graphs.py) are compiled, because every further number of rows would need
another program; the others run eagerly. Attention is one opaque operation to the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from services.target.kernels.dispatch import Planner
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Outputs
from services.target.model.modules import ModuleRunner
from services.target.step.batch import Batch

_PROGRAMS = 256  # most programs of one function: sizes times kinds of layers


class CompiledRunner(ModuleRunner):
    """Runs the steps of `run` compiled, up to a number of rows, and those of `forward` eagerly."""

    def __init__(self, module: Any, planner: Planner, most_rows: int) -> None:
        """Raises ConfigError for a model whose layers cannot be found."""
        super().__init__(module, planner)
        self._most_rows = most_rows
        count = module.config.get_text_config().num_hidden_layers
        decoder = module.get_decoder()
        lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
        if not lists:
            raise ConfigError(f"--enable-torch-compile does not suit {type(module).__name__}; leave it out")
        for part in module.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                # A tensor, because a Python number would give every layer its own program.
                part.register_buffer("outrider_layer", torch.tensor(part.layer_idx), persistent=False)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _PROGRAMS)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, _PROGRAMS
        )
        for layer in lists[0]:
            # Only the function, not the call of the module: hooks that take hidden states stay outside of the program,
            # which is then the same for steps with and without them.
            layer.forward = torch.compile(layer.forward, dynamic=False)

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """As `Runner.forward`."""
        with torch.compiler.set_stance("force_eager"):
            return super().run(batch, cache, self.planner)

    def run(self, batch: Batch, cache: KVCache, planner: Planner) -> Outputs:
        """As `ModuleRunner.run`; compiled for each number of rows that it is called with."""
        if len(batch) <= self._most_rows:
            return super().run(batch, cache, planner)
        with torch.compiler.set_stance("force_eager"):
            return super().run(batch, cache, planner)


def compiled(runner: ModuleRunner, most_rows: int) -> CompiledRunner:
    """A runner of the same modules that compiles steps of up to `most_rows` rows."""
    return CompiledRunner(runner.module, runner.planner, most_rows)
