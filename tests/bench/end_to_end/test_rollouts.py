"""The benchmark of a loop of rollouts and training, whose systems and trainer are simulated."""

import json
from pathlib import Path

import pytest

from bench.end_to_end import rollouts


def test_program_writes_a_row_per_step_and_a_plot(report_folder, monkeypatch):
    """The policy's steps are those of the example; systems differ by their training alone."""
    loop, asked = rollouts.example(), []

    def measure(loop, flags, texts, args):
        asked.append((flags, texts))
        length = 3.0 if "--online" in flags else 2.0
        step = (length, 1e-5 * length, 1.0, 1.0, 2.0, 3.0, 0.5)
        steps = [loop.Step(0.1 * i, *step) for i in range(args.steps)]
        return rollouts.Run(steps, [{"steps": 32 * i, "kept": i} for i in range(args.steps)])

    monkeypatch.setattr(rollouts, "measure", measure)
    monkeypatch.setattr(rollouts, "resolve", Path)
    file = report_folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", "b")))
    rollouts.main([str(file), "--model-path", "tiny", "--steps", "3"])
    (frozen, texts), (online, same) = asked
    assert online[: len(frozen)] == frozen
    assert "--online" in online
    assert texts == same == ["a", "b"]
    rows = json.loads((report_folder / "rollouts.json").read_text())["rows"]
    assert [(r["step"], r["reward"], r["online"], r["frozen"], r["gap"], r["kept"]) for r in rows] == [
        (1, 0.0, 3.0, 2.0, "3.0e-05", 0), (2, 0.1, 3.0, 2.0, "3.0e-05", 1), (3, 0.2, 3.0, 2.0, "3.0e-05", 2),
    ]  # fmt: skip
    assert (report_folder / "rollouts.png").exists()
    assert loop.Step.__doc__


class Letters:
    """A tokenizer of letters."""

    def apply_chat_template(self, messages, **_):
        return [ord(letter) for letter in messages[-1]["content"]]

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(("text", "reward"), [("ABC d", 0.75), ("12 !", 0.0), ("abc", 0.0), ("A", 1.0)])
def test_reward_is_the_share_of_capitals(text, reward):
    prompts, reward_of = rollouts.example().capitals(Letters(), ["hello"])
    assert "capital letters" in "".join(map(chr, prompts[0]))
    assert reward_of(0, list(map(ord, text))) == reward
