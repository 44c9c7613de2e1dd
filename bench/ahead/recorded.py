"""Texts of a target with its hidden states, so that a head can draft for them without the target.

A token depends only on model, path, seed and position, so a text is the same whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import resolve
from outrider.config import Quantization, TargetConfig
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.draft.drafters.base import Drafter


class Recording(NamedTuple):
    """One answer. opening: its session; text: prompt and answer; features: [n, row bytes], all but the last token's."""

    opening: OpenSession
    text: NDArray[np.uint32]
    features: NDArray[np.uint8]


def chat_tokens(model: str, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of conversations with one user's turn each."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(resolve(model))
    turns = ([{"role": "user", "content": text}] for text in texts)
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


def record(
    model: str,
    quantization: Quantization | None,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new: int,
    temperature: float,
) -> Iterator[Recording]:
    """Plain answers of `new` tokens to all prompts, with the states that a drafter reads."""
    from services.target.engine.engine import TargetEngine
    from services.target.model.loading.load import load
    from services.target.speculation.mode_selector import SpeculationMode

    folder = resolve(model)
    config = TargetConfig(
        model_path=str(folder), quantization=quantization, max_total_tokens=8192, self_speculation="off",
        disable_radix_cache=True, coalesce_seconds=0.0,
    )  # fmt: skip
    engine = TargetEngine(load(folder, config), config, [SpeculationMode.DRAFT_IF_READY])
    assert drafter.features is not None
    spec = drafter.features.id(drafter.fusion)
    engine.configure_features(spec, drafter.features, drafter.fusion)
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=i)
        stop = StopConditions(new, ignore_eos=True)
        opening = OpenSession(i, np.array(prompt, np.uint32), len(prompt), sampling, stop)
        engine.open(replace(opening, feature_spec=spec))
        text, rows = [opening.tokens], list[NDArray[np.uint8]]()
        while not engine.idle:
            output = engine.step()
            text += [commit.tokens for commit in output.commits]
            rows += [block.rows.copy() for block in output.features]
        yield Recording(opening, np.concatenate(text), np.concatenate(rows))
