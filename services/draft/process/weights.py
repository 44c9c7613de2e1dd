"""The draft's weights on its devices: number format, quantization, tensor parallelism, and the attention kernel."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from outrider.config import FED_ALGORITHMS, DraftConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from services.draft.formats.base import DraftCheckpoint
from services.draft.kernels.base import Backend
from services.draft.model.layers.backend import choose
from services.draft.model.layers.config import ModelConfig
from services.draft.model.matrices.quantized import INT4, quantization_format, quantize_params
from services.draft.model.parallel.devices import host_device
from services.draft.model.parallel.mesh import MeshPlacement, place_on_mesh
from services.draft.model.params import Params

log = logging.getLogger(__name__)


def chosen_quantization(config: DraftConfig, backend: Backend) -> str | None:
    """The flag's value; int8 for int4 without the compiled kernels.

    With these, the bundled head defaults to int8, which they read in half the time. A model that computes while the
    target waits defaults to int4: texts do not depend on it, and its time is the target's.
    """
    chosen = config.speculative_draft_model_quantization
    if chosen == INT4 and backend != "cpu":
        log.warning("the draft model is quantized to int8: only the compiled CPU kernels compute in int4")
        return "int8"
    waited_for = config.speculative_algorithm not in FED_ALGORITHMS and config.draft_ahead == "off"
    if chosen is None and backend == "cpu" and waited_for:
        return INT4
    bundled = config.speculative_draft_model_path == str(DEFAULT_HEAD)
    return "int8" if chosen is None and bundled and backend == "cpu" else chosen


def choose_backend(model: ModelConfig, config: DraftConfig, devices: list[jax.Device], dtype: DTypeLike) -> Backend:
    """The attention kernel. Raises ConfigError."""
    wanted = config.draft_attention_backend
    if len(devices) > 1 and devices[0].platform == "cpu":  # the compiled kernels use all cores for one device
        if wanted == "cpu":
            raise ConfigError("--draft-attention-backend cpu uses all cores for one device; leave out --draft-tp-size")
        wanted = "plain"
    return choose(wanted, devices[0], model, dtype, config.draft_page_size)


def place_weights(
    draft: DraftCheckpoint, dtype: DTypeLike, quantization: str | None, devices: list[jax.Device]
) -> tuple[ModelConfig, Params, MeshPlacement | None]:
    """A device's part of the model, the parameters on the devices, and their placement if there are several.

    Weights that are quantized or sharded are loaded in host memory, so that devices never hold more than their result.
    """
    if len(devices) == 1 and quantization_format(quantization) is None:
        return draft.config, draft.load(dtype), None
    with jax.default_device(host_device()):
        params = quantize_params(draft.load(dtype), quantization)
    if len(devices) > 1:
        return place_on_mesh(devices, draft.config, params)
    return draft.config, jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), params), None
