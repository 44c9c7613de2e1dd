"""Reinforcement learning with Outrider as the rollout engine: GRPO on verifiable tasks, in one file.

Each step asks the gateway for answers, with and without speculation, rewards them, trains the policy in PyTorch, and
pushes its weights to the targets through shared memory; the draft follows. The gateway runs on this machine and allows
control without a key from it:

outrider serve --dtype float32 --admin-networks 127.0.0.0/8 --online
python docs/examples/rollouts.py FOLDER [http://127.0.0.1:30000] [PROMPTS]

FOLDER: the checkpoint that the target serves, or `default`. The tasks are sums, whose answer is to be
the number alone; or prompts of a file, JSON lines with "prompt", whose answers are to be in capital letters.
"""

# ruff: noqa: T201

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

Reward = Callable[[int, list[int]], float]
"""The reward of an answer: number of its prompt, and its token ids."""


@dataclass(frozen=True)
class Answer:
    """A rollout. task: number of its prompt; logprobs: of its tokens, as the engine computed them."""

    task: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    verifications: int


@dataclass(frozen=True)
class Step:
    """What a step reports. gap: difference between the engine's log-probabilities and the trainer's, root mean square.

    largest_gap: of a token; same: answers with equal tokens with and without speculation
    """

    reward: float
    accept_length: float
    gap: float
    largest_gap: float
    same: float
    speculated_seconds: float
    plain_seconds: float
    train_seconds: float
    push_seconds: float

    def __str__(self) -> str:
        return (
            f"reward {self.reward:.3f}  accept length {self.accept_length:.2f}  log-probability gap {self.gap:.1e}, "
            f"at most {self.largest_gap:.1e}  same {self.same:.0%}  rollouts {self.speculated_seconds:.2f} s, plain "
            f"{self.plain_seconds:.2f} s  training {self.train_seconds:.2f} s  push {self.push_seconds:.2f} s"
        )


class Engine:
    """The gateway, over SGLang's protocol."""

    def __init__(self, url: str, key: str = "") -> None:
        """key: of an administrator; empty where the gateway needs none."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=600)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def post(self, route: str, **body: Any) -> Any:
        """The answer to a request."""
        answer = self._client.post(route, json=body)
        if answer.is_error:
            raise RuntimeError(f"{route}: {answer.text}")
        return answer.json()

    def generate(
        self, prompts: Sequence[list[int]], count: int, max_tokens: int, seed: int, speculation: str = "auto"
    ) -> list[Answer]:
        """Sampled answers at temperature 1, `count` to each prompt."""
        sampling = [
            {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "n": count, "max_new_tokens": max_tokens,
             "sampling_seed": seed + task * count}
            for task in range(len(prompts))
        ]  # fmt: skip
        bodies = self.post(
            "/generate", input_ids=list(prompts), sampling_params=sampling, return_logprob=True, speculation=speculation
        )
        answers = []
        for number, body in enumerate(bodies):
            task, info = number // count, body["meta_info"]
            values, tokens, *_ = zip(*info["output_token_logprobs"], strict=True)
            answers.append(Answer(task, prompts[task], list(tokens), list(values), info.get("spec_verify_ct", 0)))
        return answers

    def push(self, model: torch.nn.Module, version: str, dtype: torch.dtype = torch.float32) -> None:
        """Send a model's weights as SGLang's clients do, through shared memory, in a number format."""
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensors = [(name, parameter.detach().to(dtype).contiguous()) for name, parameter in model.named_parameters()]
        pickle = io.BytesIO()
        ForkingPickler(pickle).dump(tensors)
        content = base64.b64encode(pickle.getvalue()).decode()
        self.post("/pause_generation", mode="retract")
        self.post("/update_weights_from_tensor", serialized_named_tensors=[content], weight_version=version)
        self.post("/continue_generation")


def log_probabilities(
    model: Any, answers: Sequence[Answer], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities of the answers' tokens, [answers, longest], and which of them there are.

    dtype: of the forward pass, bfloat16 by autocast
    """
    paths = [answer.prompt + answer.tokens for answer in answers]
    longest = max(map(len, paths))
    ids = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    first = torch.tensor([len(answer.prompt) for answer in answers])[:, None]
    stop = torch.tensor([len(path) for path in paths])[:, None]
    position = torch.arange(int(first.min()), longest)  # a large part of the time is that of logits: none of prompts
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=ids[:, :-1], logits_to_keep=position - 1).logits
    found = logits.float().log_softmax(-1).gather(-1, ids[:, position, None])[..., 0]
    return found, (position >= first) & (position < stop)


def most_different(answers: Sequence[Answer], rewards: Sequence[float], count: int) -> list[int]:
    """Numbers of the answers to train: of each prompt those with the highest and lowest rewards, `count` in all.

    Their rewards have the largest variance, and the others' gradients would add little (arXiv 2504.13818).
    """
    chosen = []
    for task in sorted({answer.task for answer in answers}):
        own = sorted((number for number, answer in enumerate(answers) if answer.task == task), key=rewards.__getitem__)
        high = (count + 1) // 2
        chosen += own if len(own) <= count else own[: count - high] + own[-high:]
    return chosen


def advantages(answers: Sequence[Answer], rewards: Sequence[float]) -> Tensor:
    """Rewards relative to those of the same prompt, in its standard deviations (GRPO)."""
    groups = torch.tensor([answer.task for answer in answers])
    values, found = torch.tensor(rewards), torch.zeros(len(rewards))
    for group in groups.unique():
        own = values[groups == group]
        found[groups == group] = (own - own.mean()) / (own.std(correction=0) + 1e-4)
    return found


def learn(
    model: Any, optimizer: Any, answers: Sequence[Answer], rewards: Sequence[float], batch: int, dtype: torch.dtype
) -> Tensor:
    """A step of GRPO. Returns the trainer's log-probabilities of all tokens minus the engine's, [tokens]."""
    scale, differences = advantages(answers, rewards), []
    total = sum(len(answer.tokens) for answer in answers)
    optimizer.zero_grad()
    for start in range(0, len(answers), batch):
        part = answers[start : start + batch]
        found, mask = log_probabilities(model, part, dtype)
        given = torch.tensor([value for answer in part for value in answer.logprobs])
        differences.append(found.detach()[mask] - given)
        (-(found * scale[start : start + batch, None] * mask).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.cat(differences)


def train(
    model: Any,
    engine: Engine,
    prompts: Sequence[list[int]],
    reward: Reward,
    *,
    steps: int = 10,
    count: int = 8,
    trained: int | None = None,
    max_tokens: int = 12,
    rate: float = 2e-5,
    batch: int = 16,
    each: int | None = None,
    minutes: float = math.inf,
    dtype: torch.dtype = torch.float32,
) -> list[Step]:
    """Run the loop, and print each step.

    count: answers to a prompt, of which `trained` are trained, by default all; batch: answers in a forward pass
    each: prompts of a step, in turn, by default all; minutes: the step in which they have passed is the last
    dtype: of the forward pass and of the weights that are pushed; those of the model keep their own
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    done: list[Step] = []
    engine.push(model, "step-0", dtype)  # an engine may compute a quantized checkpoint as it is stored
    deadline = time.perf_counter() + 60 * minutes
    for number in range(steps):
        began = time.perf_counter()
        if began > deadline:
            break
        tasks = [(number * (each or 0) + i) % len(prompts) for i in range(each or len(prompts))]
        asked = [prompts[task] for task in tasks]
        answers = engine.generate(asked, count, max_tokens, seed=1000 * number)
        speculated = time.perf_counter()
        plain = engine.generate(asked, count, max_tokens, seed=1000 * number, speculation="off")
        generated = time.perf_counter()
        rewards = [reward(tasks[answer.task], answer.tokens) for answer in answers]
        chosen = most_different(answers, rewards, trained or count)
        learnt = [answers[i] for i in chosen]
        gap = learn(model, optimizer, learnt, [rewards[i] for i in chosen], batch, dtype)
        updated = time.perf_counter()
        engine.push(model, f"step-{number + 1}", dtype)
        pushed = time.perf_counter()
        same = sum(one.tokens == other.tokens for one, other in zip(answers, plain, strict=True)) / len(answers)
        made = sum(len(answer.tokens) for answer in answers)
        verifications = sum(answer.verifications for answer in answers)
        done.append(Step(
            sum(rewards) / len(rewards), made / max(verifications, 1), gap.square().mean().sqrt().item(),
            gap.abs().max().item(), same,
            speculated - began, generated - speculated, updated - generated, pushed - updated,
        ))  # fmt: skip
        print(f"step {number + 1:2}  {done[-1]}", flush=True)
    return done


def sums(tokenizer: Any, count: int, seed: int = 0) -> tuple[list[list[int]], Reward]:
    """Prompts that ask for sums, and the reward: 1 for the number alone, half for a text that contains it."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for a, b in pairs
    ]

    def reward(task: int, tokens: list[int]) -> float:
        text, sum_of = tokenizer.decode(tokens, skip_special_tokens=True).strip(), str(sum(pairs[task]))
        return 1.0 if text == sum_of else 0.5 if sum_of in re.findall(r"\d+", text) else 0.0

    return prompts, reward


def capitals(tokenizer: Any, texts: Sequence[str]) -> tuple[list[list[int]], Reward]:
    """Prompts that ask for capital letters, and the reward: their share of an answer's letters."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\nWrite your answer in capital letters only."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for text in texts
    ]

    def reward(_: int, tokens: list[int]) -> float:
        letters = [letter for letter in tokenizer.decode(tokens, skip_special_tokens=True) if letter.isalpha()]
        return sum(letter.isupper() for letter in letters) / max(len(letters), 1)

    return prompts, reward


def main(folder: str, url: str = "http://127.0.0.1:30000", file: str | None = None) -> None:
    """Train the checkpoint in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outrider.checkpoints.checkpoint import resolve

    folder = str(resolve(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with contextlib.closing(Engine(url)) as engine:
        if file is None:
            train(model, engine, *sums(tokenizer, 8))
            return
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
        train(model, engine, *capitals(tokenizer, texts), count=4, max_tokens=64, each=6)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
