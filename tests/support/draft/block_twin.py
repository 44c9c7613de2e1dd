"""A DFlash drafter in plain PyTorch, written from the published architecture: no cache, all rows at once."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class BlockTwin:
    """config, tensors: as published; embed, head: of the target, [V, H]."""

    def __init__(self, config, tensors, target):
        self.config, self.own = config, config["dflash_config"]
        self.tensors = {name: torch.tensor(array).double() for name, array in tensors.items()}
        shared = load_file(target / "model.safetensors")
        self.embed = shared["model.embed_tokens.weight"].double()
        self.head = shared.get("lm_head.weight", shared["model.embed_tokens.weight"]).double()

    def norm(self, x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fused(self, states):
        """What the target sends. states: [n, states * H]."""
        return self.linear(states, "fc")

    def logits(self, root, fused, size):
        """Logits [size - 1, V] of the positions behind the root. fused: [n, H], features of the n tokens before it."""
        count = len(fused)
        known = self.norm(torch.tensor(fused).double(), "hidden_norm")
        ids = torch.tensor([root] + [self.own["mask_token_id"]] * (size - 1))
        x = self.embed[ids] * self.own.get("input_embedding_scale", 1.0)
        positions = torch.arange(count + size)
        for i in range(self.config["num_hidden_layers"]):
            inner = self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.attention(i, inner, known, positions)
            inner = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (self.linear(inner, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj")
        logits = F.linear(self.norm(x, "norm"), self.head)[1:] * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return (torch.tanh(logits / cap) * cap if cap else logits).numpy()

    def attention(self, i, inner, known, positions):
        config, layer = self.config, f"layers.{i}.self_attn."
        dim, size, count = config["head_dim"], len(inner), len(known)
        rows = torch.cat([known, inner])
        q = self.norm(self.linear(inner, f"{layer}q_proj").view(size, -1, dim), f"{layer}q_norm")
        k = self.norm(self.linear(rows, f"{layer}k_proj").view(count + size, -1, dim), f"{layer}k_norm")
        v = self.linear(rows, f"{layer}v_proj").view(count + size, -1, dim)
        q, k = self.rotate(q, positions[count:]), self.rotate(k, positions)
        group = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        scores = scores.masked_fill(~self.visible(i, positions[count:, None], positions[None]), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(size, -1)
        return self.linear(seen, f"{layer}o_proj")

    def visible(self, i, query, key):
        slides = self.config["layer_types"][i] == "sliding_attention"
        causal = self.config.get("is_causal", slides)
        seen = (key <= query) if causal else torch.ones_like(key <= query)
        return seen & (query - key < self.config["sliding_window"]) if slides else seen

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        inverse = self.config["rope_theta"] ** -(torch.arange(half).double() / half)
        angle = (positions[:, None] * inverse)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
