"""A DFlash or DFlash 2 drafter in plain PyTorch, written from the published architecture, without a cache."""

import numpy as np
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
        return self.states_and_logits(root, fused, size)[1]

    def corrected(self, states, logits, before, count):
        """Of a position, the `count` likeliest tokens by its logits [V], and their log-scores behind a token."""
        top = np.argsort(-logits)[:count]
        log_p = (logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())[top]
        name = "candidate_selector."
        hidden = self.tensors[f"{name}hidden_projection.weight"].numpy() @ states
        previous, following = (self.tensors[f"{name}{kind}_codebook"].numpy() for kind in ("predecessor", "successor"))
        scores = log_p + following[top] @ (previous[before] * hidden)
        return top, scores - np.log(np.exp(scores).sum() + 1 - np.exp(log_p).sum())

    def states_and_logits(self, root, fused, size):
        """As `logits`, behind the states [size - 1, H] that they are made from."""
        count = len(fused)
        known = self.norm(torch.tensor(fused).double(), "hidden_norm")
        ids = torch.tensor([root] + [self.own["mask_token_id"]] * (size - 1))
        x = self.embed[ids] * self.own.get("input_embedding_scale", 1.0)
        positions = torch.arange(count + size)
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            inner, last = self.convolved(self.norm(x, f"{layer}input_layernorm"), f"{layer}attention_conv")
            x = x + last(self.attention(i, inner, known, positions))
            inner, last = self.convolved(self.norm(x, f"{layer}post_attention_layernorm"), f"{layer}mlp_conv")
            gate, up = (self.linear(inner, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + last(self.linear(F.silu(gate) * up, f"{layer}mlp.down_proj"))
        states = self.norm(x, "norm")[1:]
        logits = F.linear(states, self.head) * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return states.numpy(), (torch.tanh(logits / cap) * cap if cap else logits).numpy()

    def convolved(self, x, name):
        """DFlash 2: x behind the first convolution of a part, and the second one. Row t sees rows t, t - 1, ..."""
        if f"{name}.base_kernel" not in self.tensors:
            return x, lambda y: y
        base, group = self.tensors[f"{name}.base_kernel"], self.own["conv_group_size"]
        taps = base.shape[1]
        changing = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)

        def convolve(y, which):
            out = torch.zeros_like(y)
            for t in range(len(y)):
                for tap in range(min(taps, t + 1)):
                    kernel = base[which, tap] + changing[t, which, tap].repeat_interleave(group)
                    out[t] += kernel * y[t - tap]
            return out

        return convolve(x, 0), lambda y: convolve(y, 1)

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
