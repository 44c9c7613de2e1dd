"""The benchmark of a loop of rollouts and training, whose systems and trainer are simulated."""

import json
from pathlib import Path

import pytest

from bench.end_to_end import rollouts


@pytest.fixture
def bench(report_folder, monkeypatch):
    """Run the benchmark with simulated systems; returns their flags and texts, and the rows of the page."""
    loop = rollouts.example()
    file = report_folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", "b")))
    asked = []

    def measure(loop, online, frozen, texts, args):
        asked.append((online, frozen, texts))
        steps = [loop.Step(0.1 * i, 3.0, 1e-5, 1e-4, 1.0, 1.0, 2.0, 3.0, 0.5) for i in range(args.steps)]
        beside = [rollouts.Rollouts(2.0, 0.5, 5.0, 6.0, {"steps": 32 * i, "kept": i}) for i in range(args.steps)]
        return list(zip(steps, beside, strict=True))

    monkeypatch.setattr(rollouts, "measure", measure)
    monkeypatch.setattr(rollouts, "resolve", Path)
    assert loop.Step.__doc__

    def run(*options, name="rollouts"):
        rollouts.main([str(file), "--model-path", "tiny", "--steps", "3", *options])
        return asked, json.loads((report_folder / f"{name}.json").read_text())

    return run


def test_program_writes_a_row_per_step_and_a_plot(bench, report_folder):
    """The policy's steps are those of the example; systems differ by their training alone."""
    ((online, frozen, texts),), page = bench()
    assert online[: len(frozen)] == frozen
    assert "--online" in online
    assert texts == ["a", "b"]
    assert [(r["step"], r["reward"], r["online"], r["frozen"], r["gap"], r["kept"]) for r in page["rows"]] == [
        (1, 0.0, 3.0, 2.0, "1.0e-05", 0), (2, 0.1, 3.0, 2.0, "1.0e-05", 1), (3, 0.2, 3.0, 2.0, "1.0e-05", 2),
    ]  # fmt: skip
    assert page["rows"][0]["same"] == 0.5
    assert "steps 2 to 3: mean accept length 1.50 (1.50 to 1.50)" in page["notes"][-1]
    assert (report_folder / "rollouts.png").exists()


class Engine:
    """Answers of one token each. verifications: of each answer."""

    def __init__(self, verifications, tokens=(5, 6)):
        self.verifications, self.tokens, self.pushed, self.asked = verifications, tokens, [], []

    def push(self, model, version, dtype):
        self.pushed.append((version, dtype))

    def generate(self, prompts, *, seed, speculation):
        self.asked.append((seed, speculation))
        answer = rollouts.example().Answer
        return [answer(0, [1], [token] * 4, [0.0] * 4, self.verifications) for token in self.tokens]


def test_both_systems_get_the_weights_and_the_same_requests():
    online, frozen = Engine(1), Engine(2, (5, 7))
    systems = rollouts.Systems(online, frozen, lambda: {"steps": 3})
    systems.push(None, "1", "bfloat16")
    answers = systems.generate([[1]], seed=4)
    assert [answer.tokens[0] for answer in systems.generate([[1]], seed=4, speculation="off")] == [5, 6]
    assert online.pushed == frozen.pushed == [("1", "bfloat16")]
    assert (online.asked, frozen.asked) == ([(4, "auto"), (4, "off")], [(4, "auto")])
    assert [answer.verifications for answer in answers] == [1, 1]
    ((length, same, *_, counters),) = systems.done
    assert (length, same, counters) == (2.0, 0.5, {"steps": 3})


def test_a_target_in_float32_has_a_page_of_its_own(bench):
    _, page = bench("--dtype", "float32", "--trained", "2", name="rollouts-float32")
    assert "target float32, trainer's forward pass bfloat16" in page["notes"][0]
    assert "the best and the worst, 2 in all" in page["notes"][0]


def test_the_best_and_the_worst_answers_of_each_prompt_are_trained():
    loop = rollouts.example()
    answers = [loop.Answer(task, [1], [2], [0.0], 1) for task in (0, 0, 0, 0, 1, 1)]
    chosen = loop.most_different(answers, [0.2, 0.9, 0.1, 0.5, 0.0, 0.0], 3)
    assert (sorted(chosen[:3]), chosen[3:]) == ([1, 2, 3], [4, 5])


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
