"""STANDALONE: a small decoder with the target's vocabulary, in Llama's published format with a tied embedding.

It sees only the target's text, not its states, so it is larger than a head and needs more text; any server can load it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.draft.formats.llama import describe_llama
from services.draft.formats.target import TargetCheckpoint
from services.draft.learning.algorithms.base import Algorithm, DraftShape, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, plain, write_folder
from services.draft.model.layers.config import ModelConfig
from services.draft.model.params import Params

_LAYERS, _HIDDEN, _HEAD_DIM = 4, 256, 64
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_EMBEDDING_SCALE = 0.05  # root mean square of the initial embedding


class Standalone(Algorithm):
    """A small decoder for a target."""

    states = FeatureSpec(final=True)
    whole_vocabulary = True

    def __init__(self, target: TargetCheckpoint, shape: DraftShape) -> None:
        """Raises ConfigError for a hidden size that is no multiple of the head size."""
        hidden = shape.hidden or min(_HIDDEN, target.hidden_size)
        dim = _HEAD_DIM if hidden > _HEAD_DIM else max(hidden // 4, 2)
        if hidden % dim:
            raise ConfigError(f"--hidden-size {hidden} must be a multiple of {dim}")
        self._target, self._hidden, heads = target, hidden, hidden // dim
        raw = target_config(target)
        inner, layers = shape.inner or -(-8 * hidden // 3 // 32) * 32, shape.layers or _LAYERS
        self.config = llama_config(raw, "LlamaForCausalLM", hidden, inner, layers) | {
            "num_attention_heads": heads, "num_key_value_heads": 1 if heads % 2 else heads // 2, "head_dim": dim,
            "tie_word_embeddings": True, "vocab_size": target.vocab_size,
            **{key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None},
        }  # fmt: skip
        self.model: ModelConfig = describe_llama(self.config, "LlamaForCausalLM")

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The embedding holds the first principal components of the target's; the rest is random."""
        del ids, scales
        init = RandomInit(seed)
        theirs = np.asarray(target.embedding_and_head(plain)["head"]).T  # [V, Ht]
        _, _, ways = np.linalg.svd(theirs.T @ theirs)
        embedding = theirs @ ways[: self._hidden].T
        embedding *= _EMBEDDING_SCALE / np.sqrt(np.mean(embedding**2))
        return {
            "embed": jnp.asarray(embedding, jnp.float32),
            "norm": jnp.ones(self._hidden, jnp.float32),
            "layers": [first_layer(layer, self._hidden, init) for layer in self.model.layers],
        }

    def head(self, params: Params) -> Any:
        """The embedding, which is tied."""
        return params["embed"].T

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json, model.safetensors in bfloat16, and the target's tokenizer."""
        del ids
        tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer_tensors(layer, own).items()}
        write_folder(folder, self.config, tensors)
        theirs = self._target.folder
        for name in (*_TOKENIZER, *checkpoint.chat_template_files(theirs)):
            if (theirs / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(theirs / name, folder / name)
