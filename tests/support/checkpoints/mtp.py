"""Tiny checkpoints with MTP layers, and the same layers by `transformers`.

An MTP layer is a decoder layer of its model: the tensors of the model's last layer are taken, with other numbers, and
written under the names of the published layout. `Reference` gives them back to the model's own class.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from tests.support.checkpoints.families import write_family

Tensors = dict[str, torch.Tensor]

# Of each layout: where the layer stands, and the names of the join.
PREFIXES = {
    "deepseek-v3": "model.layers.3.", "glm-4.5": "model.layers.3.", "mimo": "model.mtp_layers.0.",
    "mimo-v2": "model.mtp.layers.0.", "qwen3-next": "mtp.layers.0.", "step-3.5": "model.layers.3.",
    "qwen3.5": "mtp.layers.0.", "qwen3.5-moe": "mtp.layers.0.",
}  # fmt: skip
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_JOINS = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "mimo-v2": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "step-3.5": ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
    "qwen3-next": _QWEN,
    "qwen3.5": _QWEN,
    "qwen3.5-moe": _QWEN,
}
_OWN_HEAD = "transformer.shared_head.output.weight"  # of Step-3.5
_CENTERED = ("qwen", "step")  # beginnings of families whose norms multiply by 1 + weight
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def write_mtp(folder: Path, family: str, layers: int = 1, **changes: Any) -> Path:
    """Write a target with its MTP layers. changes: of its configuration."""
    write_family(folder, family, **changes)
    tensors = _load(folder)
    for i in range(layers):
        tensors |= mtp_layer(folder, family, prefix_of(family, i), seed=i)
    _save(folder, tensors)
    return folder


def prefix_of(family: str, layer: int) -> str:
    """What the names of an MTP layer begin with."""
    first = PREFIXES[family]
    return first.replace(".3.", f".{3 + layer}.") if ".3." in first else first.replace(".0.", f".{layer}.")


def mtp_layer(folder: Path, family: str, prefix: str | None = None, seed: int = 0) -> Tensors:
    """The tensors of an MTP layer for the model in a folder. prefix: of its names, by default the published one."""
    prefix = PREFIXES[family] if prefix is None else prefix
    generator, tensors = torch.Generator().manual_seed(100 + seed), _load(folder)
    size = tensors["model.embed_tokens.weight"].shape[1]

    def like(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm.weight", "bias", "sinks")):
            return tensor + 0.1 * noise
        return noise * tensor.std()

    old = last_layer(folder)
    layer = {
        prefix + published(family, name.removeprefix(old)): like(name, tensor)
        for name, tensor in tensors.items()
        if name.startswith(old)
    }
    embedding, hidden, join, norm = (_joined(prefix, name) for name in _JOINS.get(family, _DEEPSEEK))
    center = 0.0 if family.startswith(_CENTERED) else 1.0
    for name in (embedding, hidden, norm):
        layer[f"{name}.weight"] = center + 0.2 * torch.randn(size, generator=generator)
    layer[f"{join}.weight"] = torch.randn(size, 2 * size, generator=generator) * size**-0.5
    if family == "step-3.5":
        head = tensors["lm_head.weight"]
        layer[prefix + _OWN_HEAD] = torch.randn(head.shape, generator=generator) * head.std()
    if family not in _JOINS:
        layer[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        layer[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return layer


def _joined(prefix: str, name: str) -> str:
    return name if name.startswith("mtp.") else prefix + name


def published(family: str, name: str) -> str:
    """The MTP layer's name of a decoder layer's tensor."""
    return name.replace("post_attention_layernorm", "pre_mlp_layernorm") if family == "mimo-v2" else name


def as_multimodal(folder: Path, place: Path) -> Path:
    """The same as Qwen3.5 publishes it: beside what sees images, with one tensor for all experts."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in _load(folder).items()
    }
    if config.get("num_experts"):
        experts = [
            {part: tensors.pop(f"mtp.layers.0.mlp.experts.{i}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for i in range(config["num_experts"])
        ]
        joined = [torch.cat([expert["gate"], expert["up"]]) for expert in experts]
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack(joined)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack([expert["down"] for expert in experts])
    place.mkdir()
    _save(place, tensors)
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
    }
    (place / "config.json").write_text(json.dumps(whole))
    return place


def last_layer(folder: Path) -> str:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return f"model.layers.{layers - 1}."


def _load(folder: Path) -> Tensors:
    return safetensors.torch.load_file(folder / "model.safetensors")


def _save(folder: Path, tensors: Tensors) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Reference:
    """The MTP layer of a folder, computed by the model's own class row by row, wrapped by the formulas."""

    def __init__(self, folder: Path, family: str, scratch: Path, *, prefix: str | None = None, own: str = "normed"):
        """scratch: a folder that may be written. own: the state that is handed on, "normed" or "raw"."""
        from transformers import AutoModelForCausalLM

        prefix = PREFIXES[family] if prefix is None else prefix
        self.family, self.own, tensors = family, own, _load(folder)
        shutil.copytree(folder, scratch)
        last = last_layer(folder)
        swapped = {
            name: tensors[prefix + published(family, name.removeprefix(last))] if name.startswith(last) else tensor
            for name, tensor in tensors.items()
            if "mtp" not in name and not name.startswith(tuple(prefix_of(family, i) for i in range(4)))
        }
        _save(scratch, swapped)
        config = json.loads((folder / "config.json").read_text())
        if family != "step-3.5":  # whose lists have an entry for each of them
            config["num_nextn_predict_layers"] = 0
        (scratch / "config.json").write_text(json.dumps(config))
        remote = any(folder.glob("modeling_*.py"))
        self.model = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, trust_remote_code=remote, attn_implementation="eager"
        ).eval()
        embedding, hidden, join, norm = (_joined(prefix, name) for name in _JOINS.get(family, _DEEPSEEK))
        self.norms = {name: tensors[f"{key}.weight"] for name, key in (("e", embedding), ("h", hidden), ("z", norm))}
        self.join = tensors[f"{join}.weight"]
        self.head = tensors.get(prefix + _OWN_HEAD, self.model.lm_head.weight)

    def norm(self, which: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.norms[which] + (1.0 if self.family.startswith(_CENTERED) else 0.0)
        config = self.model.config
        epsilon = getattr(config, "rms_norm_eps", None) or config.layernorm_epsilon
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    @torch.no_grad()
    def logits(self, tokens: list[int], features: np.ndarray) -> np.ndarray:
        """Logits [n, V] of the rows of all tokens but the first. features: [m, H], of the first rows; m <= n."""
        embeddings = self.model.model.embed_tokens(torch.tensor(np.asarray(tokens[1:], np.int64)))
        if self.family == "mimo":
            embeddings[0] = 0
        given = torch.tensor(features[: len(embeddings)])
        while True:
            z, handed = self.rows(embeddings[: len(given)], given)
            if len(given) == len(embeddings):
                return (z @ self.head.T).numpy()
            given = torch.cat([given, handed[-1:]])

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """Embeddings of tokens, [n, H]."""
        embeddings: torch.Tensor = self.model.model.embed_tokens(torch.tensor(np.asarray(tokens, np.int64)))
        return embeddings

    @torch.no_grad()
    def rows(self, embeddings: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States for the logits, and states that are passed on, [n, H] each, of rows at positions 0 to n - 1."""
        both = [self.norm("e", embeddings), self.norm("h", features)]
        x = torch.cat(both[::-1] if self.family == "mimo" else both, -1) @ self.join.T
        y = self._layer(x[None])[0]
        z = self.norm("z", y)
        return z, z if self.own == "normed" else y

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        core, count = self.model.model, x.shape[1]
        layer, positions = core.layers[-1], torch.arange(count)[None]
        see = torch.ones(count, count, dtype=torch.bool).tril()
        kind = getattr(layer.self_attn, "layer_type", None)
        if self.family in ("mimo-v2", "step-3.5"):
            kind = kind or layer.attention_type
            see &= ~torch.ones(count, count, dtype=torch.bool).tril(-layer.self_attn.sliding_window)
            rotation = core.rotary_emb(x, positions, kind)
        else:
            rotation = core.rotary_emb(x, positions)
        mask = torch.where(see, 0.0, -torch.inf)[None, None]
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return y[0] if isinstance(y, tuple) else y
