"""Heads in plain NumPy, written from the formulas: a row after the other, every row over all before it, no cache.

Row j pairs token j + 1 with a feature: the target's where it is given, else what row j - 1 handed on.
"""

import numpy as np
from safetensors.numpy import load_file


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x, position, theta):
    """x: [heads, D]."""
    half = x.shape[-1] // 2
    angle = position * theta ** -(np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class Twin:
    """tensors: of the head, with `layers.0.` for the first layer; shared: the target's embedding and head, [V, H]."""

    def __init__(self, kind, config, tensors, embed, head):
        self.kind, self.config, self.embed, self.head = kind, config, embed.astype(np.float64), head.astype(np.float64)
        self.tensors = {name: array.astype(np.float64) for name, array in tensors.items()}

    def logits(self, tokens, features):
        """Logits [n, V'] of the rows of all tokens but the first. features: [m, H], m <= n, of the first rows."""
        states, last, logits = [[] for _ in range(self.config["num_hidden_layers"])], None, []
        for row, token in enumerate(tokens[1:]):
            feature = features[row].astype(np.float64) if row < len(features) else last
            out, last = self.row(row, self.embed[token], feature, states)
            logits.append(self.head @ out)
        return np.array(logits)

    @classmethod
    def of(cls, kind, config, tensors, target):
        """The twin of a head that `tests.support.checkpoints.heads` made for the target in a folder."""
        shared = load_file(target / "model.safetensors")
        embed = tensors.get("embed_tokens.weight", shared["model.embed_tokens.weight"])
        head = tensors.get("lm_head.weight", shared.get("lm_head.weight", shared["model.embed_tokens.weight"]))
        named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        return cls(kind, config, named, embed, head)

    def log_probs(self, tokens, features):
        """Log-probabilities of what follows the last row, by the target's ids."""
        row = self.logits(tokens, features)[-1]
        ids = np.arange(len(row)) + self.tensors.get("d2t", np.zeros(len(row))).astype(int)
        return dict(zip(ids.tolist(), row - np.log(np.exp(row - row.max()).sum()) - row.max(), strict=True))

    def row(self, position, embedding, feature, states):
        t, epsilon = self.tensors, self.config["rms_norm_eps"]
        if self.kind == "EAGLE":
            x = t["fc.weight"] @ np.concatenate([embedding, feature]) + t.get("fc.bias", 0)
            for i, kept in enumerate(states):
                inner = norm(x, t[f"layers.{i}.input_layernorm.weight"], epsilon) if i else x
                x = self.rest(i, position, x, inner, kept)
            return x, x
        x = feature
        for i, kept in enumerate(states):
            inner = norm(x, t[f"layers.{i}.hidden_norm.weight"], epsilon)
            residual = inner if i == 0 and self.config.get("norm_before_residual") else x
            if i == 0:
                inner = np.concatenate([norm(embedding, t["layers.0.input_layernorm.weight"], epsilon), inner])
            x = self.rest(i, position, residual, inner, kept)
        out = norm(x, t["norm.weight"], epsilon)
        return out, out if self.config.get("norm_output") else x

    def rest(self, i, position, residual, inner, kept):
        """Attention over the rows kept so far and this one, and the feed-forward part."""
        t, config, p = self.tensors, self.config, f"layers.{i}."
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

        def linear(name):
            return (t[f"{p}self_attn.{name}.weight"] @ inner + t.get(f"{p}self_attn.{name}.bias", 0)).reshape(-1, dim)

        q, k, v = (linear(f"{name}_proj") for name in "qkv")
        if f"{p}self_attn.q_norm.weight" in t:
            q = norm(q, t[f"{p}self_attn.q_norm.weight"], config["rms_norm_eps"])
            k = norm(k, t[f"{p}self_attn.k_norm.weight"], config["rms_norm_eps"])
        theta = config.get("rope_theta", 10000.0)
        kept.append((rotate(k, position, theta), v))
        q, group = rotate(q, position, theta), len(q) // len(k)
        keys = np.repeat(np.stack([k for k, _ in kept]), group, 1)  # [rows, heads, D]
        values = np.repeat(np.stack([v for _, v in kept]), group, 1)
        scores = np.einsum("hd,rhd->hr", q, keys) / np.sqrt(dim)
        p_ = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("hr,rhd->hd", p_ / p_.sum(-1, keepdims=True), values).reshape(-1)
        h = residual + t[f"{p}self_attn.o_proj.weight"] @ seen
        m = norm(h, t[f"{p}post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate, up = (t[f"{p}mlp.{name}_proj.weight"] @ m for name in ("gate", "up"))
        return h + t[f"{p}mlp.down_proj.weight"] @ (silu(gate) * up)
