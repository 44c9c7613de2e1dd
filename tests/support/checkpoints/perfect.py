"""A target whose text can be predicted, and heads that predict it from tokens or features.

A state is the embedding of the token itself, because attention and feed-forward layers output zero. The embeddings have
length sqrt(H), so that norms leave them as they are. The likeliest token after c, of a cycle of tokens, is next(c), and
the linear map A takes the embedding of c to that of next(c). What a head is fed for token j is therefore e(t_j), and

    EAGLE by token      x = e(t_{j+1}), the embedding
    EAGLE by feature    x = A e(t_j), and the same again from what it hands on itself
    MTP by feature      layer i of a stack: x = A^(i+1) e(t_j)
    EAGLE-3             fusion A e(t_j), then + (A - I) e(t_{j+1}) by attention that sees its own row alone

A head that is fed the wrong token, the wrong feature or its own outputs in the wrong order goes wrong at once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.support.checkpoints.heads import DIM, HEADS, Tensors, eagle, eagle3, target_facts, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.tiny import write_model

CYCLE = np.arange(40, 80)
_SHARP = 40.0  # so much does attention prefer its own row to the one before it, as a factor on both sides of a product


def _embeddings(vocab: int, hidden: int, rng: np.random.Generator) -> np.ndarray:
    rows = rng.standard_normal((vocab, hidden))
    rows[:, 0] = 0
    rows *= np.sqrt((hidden - 1) / (rows * rows).sum(-1, keepdims=True))
    rows[:, 0] = 1  # the same in all: attention's queries and keys are made of it
    return rows.astype(np.float32)


def write_cyclic_target(
    folder: Path, *, sharpness: float = 1.0, layers: int = 8, seed: int = 0, **options: object
) -> Path:
    """The target. sharpness: factor on its logits; 1 leaves no doubt at temperature 1. options: as of write_model."""
    write_model(folder, num_hidden_layers=layers, tie_word_embeddings=False, **options)
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    _make_cyclic(tensors, sharpness, seed)
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    return folder


def _make_cyclic(tensors: Tensors, sharpness: float = 1.0, seed: int = 0) -> None:
    embed = _embeddings(*tensors["model.embed_tokens.weight"].shape, np.random.default_rng(seed))
    head = np.zeros_like(embed)
    head[np.roll(CYCLE, -1)] = sharpness * embed[CYCLE]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
    tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": head}


def _step(target: Path) -> np.ndarray:
    """The map A, [H, H]."""
    embed = safetensors.numpy.load_file(target / "model.safetensors")["model.embed_tokens.weight"][CYCLE]
    solution, *_ = np.linalg.lstsq(embed, np.roll(embed, -1, axis=0), rcond=None)
    return solution.T.astype(np.float32)


def _silent(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        if "norm" in name:
            tensors[name] = np.ones_like(tensor)


def write_perfect_eagle(folder: Path, target: Path, by: str, **config: object) -> Path:
    """An EAGLE head that looks at the token, or at the feature, alone. by: "token" or "feature"."""
    settings, tensors = eagle(target, bias=False, **config)
    _silent(tensors)
    hidden = target_facts(target)["hidden_size"]
    same, none = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32)
    tensors["fc.weight"] = np.concatenate([same, none] if by == "token" else [none, _step(target)], axis=1)
    return write_head(folder, settings, tensors)


def write_perfect_mtp(folder: Path, by: str, layers: int = 1) -> Path:
    """A cyclic target that has MTP layers itself. by: "token" or "feature"; of several layers, each looks further."""
    tensors = safetensors.numpy.load_file(write_cyclic_target(folder) / "model.safetensors")
    config = target_facts(folder)
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    same, none = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32)
    ones = np.ones(hidden, np.float32)
    for i in range(layers):
        prefix = f"model.layers.{last + 1}." if layers == 1 else f"model.mtp.layers.{i}."
        layer = {
            name.replace(f"model.layers.{last}.", prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{last}.")
        }
        ahead = np.linalg.matrix_power(_step(folder), i + 1)
        join = np.concatenate([same, none] if by == "token" else [none, ahead], axis=1)
        norm = "shared_head.norm" if layers == 1 else "final_layernorm"
        layer |= {f"{prefix}{name}.weight": ones for name in ("enorm", "hnorm", norm)}
        tensors |= layer | {f"{prefix}eh_proj.weight": join}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_perfect_mimo(folder: Path, **changes: object) -> Path:
    """A cyclic MiMo-7B, with its own code, whose MTP layer looks at the feature. changes: of its configuration."""
    file = write_mtp(folder, "mimo", **changes) / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    _make_cyclic(tensors)
    _silent(tensors)
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    step = np.ascontiguousarray(_step(folder))  # safetensors writes memory as it lies
    tensors["model.mtp_layers.0.input_proj.weight"] = np.concatenate([step, np.zeros_like(step)], axis=1)
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    return folder


def write_perfect_eagle3(folder: Path, target: Path, **config: object) -> Path:
    """An EAGLE-3 head that needs token and feature both; its own vocabulary is the cycle and a few more tokens."""
    settings, tensors = eagle3(target, vocab=60, num_key_value_heads=HEADS, rope_theta=1e6, **config)
    _silent(tensors)
    shared = safetensors.numpy.load_file(target / "model.safetensors")
    vocab, hidden = shared["model.embed_tokens.weight"].shape
    step, identity = _step(target), np.eye(hidden, dtype=np.float32)
    tensors["fc.weight"] = np.concatenate([step / 3] * 3, axis=1)
    constant = np.zeros((HEADS * DIM, 2 * hidden), np.float32)
    constant[:, 0] = np.sqrt(_SHARP)
    value = np.zeros((HEADS * DIM, 2 * hidden), np.float32)
    value[:hidden, :hidden] = identity  # the embedding's half
    output = np.zeros((hidden, HEADS * DIM), np.float32)
    output[:, :hidden] = step - identity
    layer = "midlayer.self_attn."
    tensors |= {f"{layer}q_proj.weight": constant, f"{layer}k_proj.weight": constant.copy()}
    tensors |= {f"{layer}v_proj.weight": value, f"{layer}o_proj.weight": output}
    own = np.sort(np.concatenate([CYCLE, np.setdiff1d(np.arange(vocab), CYCLE)[::13][:20]]))
    # What leaves the layer is e(t_{j+2}), so the head is the embedding itself.
    tensors["lm_head.weight"] = shared["model.embed_tokens.weight"][own]
    tensors["d2t"] = own - np.arange(60)
    tensors["t2d"] = np.isin(np.arange(vocab), own)
    return write_head(folder, settings, tensors)


def cycle_text(first: int, count: int) -> list[int]:
    """The `count` likeliest tokens after a token of the cycle."""
    place = CYCLE.tolist().index(first)
    return [int(CYCLE[(place + 1 + i) % len(CYCLE)]) for i in range(count)]
