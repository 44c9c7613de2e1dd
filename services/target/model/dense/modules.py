"""The modules of a dense decoder, which hold its weights by the names of checkpoints. They compute nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from services.target.kernels.cpu.programs.rotary import Rotary
from services.target.model.dense.config import DenseConfig


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: the weights are assigned."""


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = epsilon


class _Embedding(nn.Module):
    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size))


class _Attention(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = _Linear(width, queries, bias=config.projection_bias)
        self.k_proj = _Linear(width, keys, bias=config.projection_bias)
        self.v_proj = _Linear(width, keys, bias=config.projection_bias)
        self.o_proj = _Linear(queries, width, bias=config.output_bias)
        if config.head_norms:
            self.q_norm = _Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = _Norm(config.head_dim, config.rms_norm_eps)


class _FeedForward(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = _Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = _Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _FeedForward(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)


class _Decoder(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        with torch.device("cpu"):
            self.rotary_emb = Rotary(config.rope_parameters, config.head_dim)


class DenseDecoder(nn.Module):
    """A decoder without weights until `assign`."""

    def __init__(self, config: DenseConfig, dtype: torch.dtype) -> None:
        """dtype: of the computation."""
        super().__init__()
        self.config, self.dtype = config, dtype
        with torch.device("meta"):
            self.model = _Decoder(config)
            self.lm_head = _Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a checkpoint must have."""
        return {name: tuple(tensor.shape) for name, tensor in self.named_parameters()}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Take all tensors, in the format of the computation. They may be views of files, except for the embedding."""
        for name, module in self.named_modules():
            for own, parameter in list(module.named_parameters(recurse=False)):
                found = tensors.get(f"{name}.{own}")
                if found is not None:
                    assert found.shape == parameter.shape, "shapes are checked before"
                    setattr(module, own, nn.Parameter(found.to(self.dtype), requires_grad=False))
        embedding = self.model.embed_tokens
        embedding.weight = nn.Parameter(embedding.weight.clone(), requires_grad=False)  # the file may change later
        if self.config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight
