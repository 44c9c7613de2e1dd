"""Makes a larger target for a small draft model: the draft's own weights, with many more feed-forward columns.

    python -m bench.checkpoints.wider_pair OUTPUT [--columns 12288] [--agreement 0.8]

Each added column has random gate and up weights like those of the model, and a small random down weight. Together they
add noise to every layer that is a fixed function of the text, so that the target is a model of its own: larger, and
with the draft's greedy token in a chosen share of positions. Speed and acceptance of such a pair are realistic; its
texts are not, so nothing else may be measured with it.

The size of the noise is found with few columns: that of many is the same where the sum of their squares is.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.flags import positive_int
from bench.harness.prompts import BUNDLED_PROMPTS, read_prompts
from outrider.checkpoints import checkpoint

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_FEW = 256  # columns with which the noise is found
_TEXTS, _TOKENS = 4, 48  # texts, and tokens of each, in which agreement is counted
_HALVINGS = 5  # of the interval in which the noise lies
_LARGEST = 0.5  # its upper end, as a multiple of the model's own down weights


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder of the target, which is created")
    parser.add_argument("--draft", default="default", help="the draft model, of the Llama architecture")
    parser.add_argument("--columns", type=positive_int, default=12_288, help="added to each layer's feed-forward part")
    parser.add_argument("--agreement", type=float, default=0.8, help="share of equal greedy tokens")
    args = parser.parse_args()
    folder = checkpoint.resolve(args.draft)
    noise, agreement = find_noise(folder, args.agreement)
    print(f"noise {noise:.4f} times the down weights gives an agreement of {agreement:.2f}", flush=True)
    parameters = write(folder, args.output, args.columns, noise)
    print(f"{args.output}: {parameters / 1e6:.0f} million parameters; the draft is {folder}")


def write(folder: Path, output: Path, columns: int, noise: float) -> int:
    """Write the wider model of a folder. noise: as of `widened`, of _FEW columns. Returns its number of parameters."""
    output.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, output / name)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += columns
    config["torch_dtype"] = "bfloat16"
    (output / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors(folder).items()}
    wider = widened(tensors, columns, noise * math.sqrt(_FEW / columns))
    save_file({name: tensor.contiguous() for name, tensor in wider.items()}, output / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return sum(tensor.numel() for tensor in wider.values())


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    return found


def widened(tensors: dict[str, Tensor], columns: int, noise: float) -> dict[str, Tensor]:
    """The same tensors with random columns in each feed-forward part. noise: of the down weights' own deviation."""
    generator = torch.Generator().manual_seed(0)

    def beside(tensor: Tensor, shape: tuple[int, int], scale: float, along: int) -> Tensor:
        more = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
        return torch.cat([tensor, (more * (scale * float(tensor.float().std()))).to(tensor.dtype)], dim=along)

    wider = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            wider[name] = beside(tensor, (columns, tensor.shape[1]), 1.0, 0)
        elif name.endswith("mlp.down_proj.weight"):
            wider[name] = beside(tensor, (tensor.shape[0], columns), noise, 1)
    return wider


def find_noise(folder: Path, agreement: float) -> tuple[float, float]:
    """The noise of _FEW columns with which the share of equal greedy tokens is nearest to a given one; that share.

    The texts are the target's own: behind other texts, the two agree more often.
    """
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = copy.deepcopy(draft.config)
    config.intermediate_size += _FEW
    model: Any = type(draft)(config)
    model.load_state_dict(
        widened({name: tensor.float() for name, tensor in _tensors(folder).items()}, _FEW, 1.0), False
    )
    model.tie_weights()
    down = [layer.mlp.down_proj.weight.data[:, -_FEW:] for layer in model.model.layers]
    units = [part.clone() for part in down]
    prompts = _prompts(folder)

    def share(noise: float) -> float:
        for part, unit in zip(down, units, strict=True):
            part.copy_(noise * unit)
        return _agreement(draft, model, prompts)

    low, high = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > agreement else (low, middle)
    noise = (low + high) / 2
    return noise, share(noise)


def _prompts(folder: Path) -> list[Tensor]:
    """The shortest bundled prompts in the chat template, [1, n] each."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turns = sorted((prompt.turns[0] for prompt in read_prompts(BUNDLED_PROMPTS)), key=len)[:_TEXTS]
    chats = [[{"role": "user", "content": turn}] for turn in turns]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        for chat in chats
    ]


@torch.inference_mode()
def _agreement(draft: Any, model: Any, prompts: list[Tensor]) -> float:
    """Share of the model's greedy tokens that are the draft's as well, behind the same text."""
    same = count = 0
    for prompt in prompts:
        text = model.generate(prompt, max_new_tokens=_TOKENS, do_sample=False)
        begin = prompt.shape[1]
        best = draft(text).logits[0, begin - 1 : -1].argmax(-1)
        same += int((best == text[0, begin:]).sum())
        count += len(best)
    return same / count


if __name__ == "__main__":
    main()
