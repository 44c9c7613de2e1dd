"""The trainer's client of a target: complete, partial and failed answers."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.errors import ConfigError, ContextTooLong, EngineFault, InvalidRequest, Overloaded, Unavailable
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import EngineLoad, StepOutput
from outrider.speculation.proposal import Commit, FinishReason
from outrider.speculation.sampling import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.wire import codec
from outrider.wire.v1 import target_pb2
from services.draft.learning.records.store import Store
from services.draft.train.data import collect
from services.draft.train.data.collect import Collector, Limits, TargetClient
from services.draft.train.data.prompts import Conversation, PromptJob, jobs
from services.draft.train.data.writing import check_template
from tests.support.tiny import write_tokenizer

LIMITS = Limits(new=20, length=100, sessions=2, tokens=10**6, bytes=10**9)
ROW = 4  # bytes
EOS = 1
PROMPT = [5, 6, 7]


def commit(base, tokens, finish=FinishReason.RUNNING):
    return Commit(1, base, np.array(tokens, np.uint32), 1, finish_reason=finish)


def block(first, count):
    return FeatureBlock(1, first, np.full((count, ROW), first, np.uint8))


def answer_from(*frames):
    """The result of `write` for frames, each a list of commits and blocks: tokens and states, or the error."""

    async def run():
        client = TargetClient("unix:/nowhere", FeatureSpec(final=True))
        client.info, client.row_bytes = target_pb2.GetTargetInfoResponse(eos_token_ids=[EOS]), ROW
        task = asyncio.create_task(client.write(PROMPT, SamplingParams(), 6))
        await asyncio.sleep(0)
        for parts in frames:
            commits = [part for part in parts if isinstance(part, Commit)]
            blocks = [part for part in parts if isinstance(part, FeatureBlock)]
            client.handle_frame(codec.verify_response_to_pb(StepOutput(commits=commits, features=blocks)))
        tokens, rows = await asyncio.wait_for(task, 60)
        return tokens.tolist(), rows[:, 0].tolist()

    return asyncio.run(run())


def test_an_answer_ends_with_its_end_token_and_all_states():
    first = [commit(3, [9, 8]), block(0, 4)]
    assert answer_from(first, [commit(5, [EOS, 9]), block(4, 2)]) == ([*PROMPT, 9, 8, EOS], [0, 0, 0, 0, 4])
    assert answer_from(first, [commit(5, [EOS])], [commit(6, [9])], [block(4, 1)]) == (
        [*PROMPT, 9, 8, EOS],
        [0, 0, 0, 0, 4],
    )


def test_an_answer_without_an_end_token_ends_where_its_states_do():
    finish = [commit(4, [8, 8], FinishReason.LENGTH), block(3, 1)]
    assert answer_from([commit(3, [9]), block(0, 3)], finish) == ([*PROMPT, 9, 8], [0, 0, 0, 3])


def test_late_states_of_an_ended_answer_are_awaited(monkeypatch):
    """States of wide models take several frames, behind all commits."""
    monkeypatch.setattr(collect, "_LATE_ROWS", 3600.0)
    begun, finish = [commit(3, [9])], [commit(4, [8, 8], FinishReason.LENGTH), block(0, 1)]
    assert answer_from(begun, finish, [block(1, 1)], [block(2, 1)]) == ([*PROMPT, 9], [0, 1, 2])
    finish = [commit(4, [8]), commit(5, [EOS, 8], FinishReason.LENGTH), block(0, 3), block(3, 1)]
    assert answer_from(begun, finish) == ([*PROMPT, 9, 8], [0, 0, 0, 3])


def test_wait_for_missing_states_is_bounded(monkeypatch):
    monkeypatch.setattr(collect, "_LATE_ROWS", 0.01)
    ended = [commit(4, [EOS])], [commit(5, [9, 9], FinishReason.LENGTH)]
    assert answer_from([commit(3, [9])], *ended) == (PROMPT[:1], [])
    assert answer_from([commit(3, [9]), block(0, 3)], *ended) == ([*PROMPT, 9], [0, 0, 0])


def test_late_states_of_a_closed_session_are_awaited(monkeypatch):
    monkeypatch.setattr(collect, "_LATE_ROWS", 3600.0)
    frames = [commit(3, [9])], [commit(4, [EOS])], [commit(5, [9], FinishReason.LENGTH)], [block(0, 3)], [block(3, 1)]
    assert answer_from(*frames) == ([*PROMPT, 9, EOS], [0, 0, 0, 3])


def test_an_answer_with_a_gap_in_its_states_fails():
    with pytest.raises(Overloaded, match="dropped on the way"):
        answer_from([commit(3, [9]), block(0, 3)], [commit(4, [9]), commit(5, [9]), block(4, 1)])


def test_unreadable_frame_breaks_the_stream():
    """No request waits forever for later frames."""

    class Call:
        async def read(self):
            await asyncio.sleep(0)
            return codec.verify_response_to_pb(StepOutput(commits=[commit(7, [9])]))

        async def write(self, frame):
            pass

        def cancel(self):
            pass

    async def run():
        client = TargetClient("unix:/nowhere", FeatureSpec(final=True))
        client.stub = SimpleNamespace(Verify=Call)
        task = asyncio.create_task(client.write(PROMPT, SamplingParams(), 6))
        await asyncio.sleep(0)
        await asyncio.wait_for(client.receive(), 60)
        await asyncio.wait_for(task, 60)

    with pytest.raises(Unavailable, match="cannot be read"):
        asyncio.run(run())


async def test_new_target_weights_end_the_stream():
    """A new connection compares the fingerprint of the weights."""

    class Call:
        async def read(self):
            await asyncio.sleep(0)
            output = StepOutput(commits=[commit(3, [9])], features=[block(0, 3)])
            return codec.verify_response_to_pb(replace(output, load=EngineLoad(weight_version="two")))

        async def write(self, frame):
            pass

        def cancel(self):
            pass

    client = TargetClient("unix:/nowhere", FeatureSpec(final=True))
    client.info.weight_version, client.stub = "one", SimpleNamespace(Verify=Call)
    task = asyncio.create_task(client.write(PROMPT, SamplingParams(), 6))
    await asyncio.sleep(0)
    await asyncio.wait_for(client.receive(), 60)
    with pytest.raises(Unavailable, match="new weights, 'two'"):
        await asyncio.wait_for(task, 60)


# --- what is asked ---


def tokenizer_of(folder, *, template=True):
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if not template:
        del settings["chat_template"]
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    return Tokenizer(files | {"tokenizer_config.json": json.dumps(settings).encode()})


def writer_of(tokenizer, write):
    return SimpleNamespace(tokenizer=tokenizer, write=write, info=SimpleNamespace(eos_token_ids=[EOS]))


async def write_three(prompt, sampling, new):
    tokens = np.array([*prompt, 40, 41, EOS], np.uint32)
    return tokens, np.zeros((len(tokens) - 1, ROW), np.uint8)


def jobs_of(*conversations):
    return iter([PromptJob(i, conversation, 0.0, i) for i, conversation in enumerate(conversations)])


def test_model_without_chat_template_continues_texts(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "tokenizer", template=False)
    store = Store(tmp_path / "store", {}, ROW)
    asyncio.run(Collector(writer_of(tokenizer, write_three), store, LIMITS, 0.0).run(jobs_of(Conversation("a", "so"))))
    assert (len(store), store.token_count) == (1, 3)


@pytest.mark.parametrize(
    ("conversations", "free", "what"),
    [
        ([Conversation("a", "so")], None, None), ([], None, "cannot begin"),
        ([Conversation("a", "so")], 3, "cannot begin"),
        ([Conversation("a", "so"), Conversation("b", turns=("hm",))], 0, "1 of 2 prompts"),
    ],
)  # fmt: skip
def test_chats_need_a_template(tmp_path, conversations, free, what):
    check_template(tokenizer_of(tmp_path), conversations, free)
    bare = tokenizer_of(tmp_path, template=False)
    if what is None:
        check_template(bare, conversations, free)
        return
    with pytest.raises(ConfigError, match=f"no chat template.*{what}"):
        check_template(bare, conversations, free)


# --- what comes of answers that fail ---


def collected(folder, errors, jobs, **limits):
    """A collector that has run. errors: by prompt, the errors of the target before its answer."""
    tokenizer = tokenizer_of(folder / "tokenizer")
    errors = {text: list(parts) for text, parts in errors.items()}

    async def write(prompt, sampling, new):
        await asyncio.sleep(0)
        if parts := errors.get(tokenizer.decode(prompt)):
            raise parts.pop(0)
        return await write_three(prompt, sampling, new)

    store = Store(folder / "store", {}, ROW)
    collector = Collector(writer_of(tokenizer, write), store, replace(LIMITS, **limits), 0.0)
    return collector, store, lambda: asyncio.run(collector.run(jobs))


def texts(count):
    return jobs_of(*(Conversation(str(i), f"t{i}") for i in range(count)))


def test_overloaded_target_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "_PAUSES", (0.0, 0.0, 0.0))
    collector, store, run = collected(
        tmp_path, {"t1": [Overloaded("full")] * 3, "t2": [Overloaded("full")] * 4}, texts(4)
    )
    run()
    assert store.jobs == {0, 1, 3}
    assert collector.left_out_summary == "1 failed (the last one: full)"


def test_refused_and_failed_prompts_are_skipped(tmp_path):
    errors = {"t1": [ContextTooLong("too long")], "t2": [EngineFault("not finite")]}
    collector, store, run = collected(tmp_path, errors, texts(5))
    run()
    assert store.jobs == {0, 3, 4}
    assert dict(collector.left_out) == {"refused": 1, "failed": 1}


def test_faults_of_all_sessions_end_the_run(tmp_path):
    errors = {f"t{i}": [EngineFault("not finite")] for i in range(100)}
    collector, store, run = collected(tmp_path, errors, texts(100))
    with pytest.raises(EngineFault, match="not finite"):
        run()
    assert not len(store)
    assert collector.left_out["failed"] < 100


@pytest.mark.parametrize("prompt", ["x" * 200, "t"])
def test_prompts_without_answers_end_the_run(tmp_path, monkeypatch, prompt):
    """With sampled answers, jobs have no end."""
    monkeypatch.setattr(collect, "_MAX_FUTILE", 50)
    endless = jobs([Conversation("a", prompt)], 0, (1.0,), 0)
    _, store, run = collected(tmp_path, {"t": [InvalidRequest("no")] * 60}, endless)
    with pytest.raises(InvalidRequest, match=r"last 50 prompts led to no answer: 50 (too long|refused)"):
        run()
    assert not len(store)
