"""Each kind of draft model's published command line, with `outrider serve` and tiny checkpoints in published layouts.

N-gram drafts are those of other tests here. Only the paths are others, cores are named so that the draft has one of its
own, and the target's KV cache is small.
"""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints.perfect import (
    CYCLE,
    write_cyclic_target,
    write_perfect_eagle,
    write_perfect_eagle3,
    write_perfect_mimo,
    write_perfect_mtp,
)
from tests.support.draft.token_maps import write_map
from tests.support.gateway.services import until
from tests.support.outrider.command_lines import words
from tests.support.system.serve import System
from tests.support.tiny import write_tokenizer

pytestmark = pytest.mark.system

_SLOW = {"intermediate_size": 16000}  # slow enough for proposals to arrive in time
_NEXT = dict(zip(CYCLE.tolist(), np.roll(CYCLE, -1).tolist(), strict=True))
_PROMPT = "Words that the model continues with a cycle of forty tokens"


def eagle(folder: Path) -> dict[str, Path]:
    """An EAGLE head as lmsys publishes those of Llama, with FR-Spec's list of frequent tokens."""
    target = write_cyclic_target(folder / "target", num_key_value_heads=4, **_SLOW)
    head = write_perfect_eagle(folder / "head", target, "feature", architectures=["LlamaForCausalLMEagle"])
    frequent = write_map(folder, [*CYCLE.tolist(), 5, 6])
    return {"--model": target, "--speculative-draft-model-path": head, "--speculative-token-map": Path(frequent)}


def eagle3(folder: Path) -> dict[str, Path]:
    target = write_cyclic_target(folder / "target", **_SLOW)
    return {"--model": target, "--speculative-draft-model-path": write_perfect_eagle3(folder / "head", target)}


def mimo(folder: Path) -> dict[str, Path]:
    return {"--model": write_perfect_mimo(folder / "target", **_SLOW)}


def standalone(folder: Path) -> dict[str, Path]:
    """Two models of one family and one tokenizer."""
    target = write_cyclic_target(folder / "target", family="qwen2", **_SLOW)
    small = write_cyclic_target(folder / "draft", family="qwen2", layers=2)
    return {"--model": target, "--speculative-draft-model-path": write_tokenizer(small)}


def stacked(folder: Path) -> dict[str, Path]:
    """Three MTP layers, each of which looks one token further, in MiMo-V2's layout."""
    return {"--model": write_perfect_mtp(folder / "target", "feature", layers=3)}


_STACKED = ["--model", "stacked/model", "--speculative-algorithm", "EAGLE", "--enable-multi-layer-eagle"]
_STACKED += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
LINES = {
    "EAGLE-2 with a token map": (words("4"), eagle),
    "EAGLE-3": (words("6"), eagle3),
    "MTP": (words("7"), mimo),
    "STANDALONE": (words("8"), standalone),
    "multi-layer EAGLE": (_STACKED, stacked),
}


def with_paths(line: list[str], paths: dict[str, Path]) -> list[str]:
    """The line with the values of some flags replaced, the model left out."""
    changed = list(line)
    for flag, path in paths.items():
        changed[changed.index(flag) + 1] = str(path)
    place = changed.index("--model")
    return changed[:place] + changed[place + 2 :]


_OFTEN = {"EAGLE-3"}  # the others differ in what the draft service loads


@pytest.mark.parametrize(
    "name", [name if name in _OFTEN else pytest.param(name, marks=pytest.mark.long) for name in LINES]
)
def test_a_published_line_speculates_and_keeps_the_text(name, tmp_path):
    line, write = LINES[name]
    paths = write(tmp_path)
    write_tokenizer(paths["--model"])
    first, *others = sorted(os.sched_getaffinity(0))
    flags = [*with_paths(line, paths), "--max-total-tokens", "4096"]
    if others:
        flags += ["--cores-target", str(first), "--cores-draft", str(others[0])]
    system = System(paths["--model"], *flags, sessions=2).wait()

    def speculated():
        answer = system.client.completions.create(
            model="default", prompt=_PROMPT, max_tokens=100, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        tokens = answer.choices[0].token_ids
        assert all(_NEXT[token] == after for token, after in itertools.pairwise(tokens))
        assert len(tokens) == 100
        return system.metric("outrider_accepted_draft_tokens_total") > 0

    try:
        until(speculated, 90)  # on a busy machine not at once, because late proposals are not verified
    finally:
        assert system.stop() == 0
