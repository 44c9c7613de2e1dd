"""What a trainer hears of a target: answers that come whole, in part, or not at all."""

import asyncio

import numpy as np
import pytest

from outrider.errors import Overloaded
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import StepOutput
from outrider.speculation.proposal import Commit, FinishReason
from outrider.speculation.sampling import SamplingParams
from outrider.wire import codec
from outrider.wire.v1 import target_pb2
from services.draft.train import collect
from services.draft.train.collect import Writer

ROW = 4  # bytes
EOS = 1
PROMPT = [5, 6, 7]


def commit(base, tokens, finish=FinishReason.RUNNING):
    return Commit(1, base, np.array(tokens, np.uint32), 1, finish_reason=finish)


def block(first, count):
    return FeatureBlock(1, first, np.full((count, ROW), first, np.uint8))


def heard(*frames):
    """What `write` makes of frames, each a list of commits and blocks: tokens and states, or the error."""

    async def run():
        writer = Writer("unix:/nowhere", FeatureSpec(final=True))
        writer.info, writer.row_bytes = target_pb2.GetTargetInfoResponse(eos_token_ids=[EOS]), ROW
        task = asyncio.create_task(writer.write(PROMPT, SamplingParams(), 6))
        await asyncio.sleep(0)
        for said in frames:
            commits = [part for part in said if isinstance(part, Commit)]
            blocks = [part for part in said if isinstance(part, FeatureBlock)]
            writer._hear(codec.verify_response_to_pb(StepOutput(commits=commits, features=blocks)))
        tokens, rows = await asyncio.wait_for(task, 60)
        return tokens.tolist(), rows[:, 0].tolist()

    return asyncio.run(run())


def test_an_answer_ends_with_its_end_token_and_all_states():
    first = [commit(3, [9, 8]), block(0, 4)]
    assert heard(first, [commit(5, [EOS, 9]), block(4, 2)]) == ([*PROMPT, 9, 8, EOS], [0, 0, 0, 0, 4])
    assert heard(first, [commit(5, [EOS])], [commit(6, [9])], [block(4, 1)]) == ([*PROMPT, 9, 8, EOS], [0, 0, 0, 0, 4])


def test_an_answer_without_an_end_token_ends_where_its_states_do():
    finish = [commit(4, [8, 8], FinishReason.LENGTH), block(3, 1)]
    assert heard([commit(3, [9]), block(0, 3)], finish) == ([*PROMPT, 9, 8], [0, 0, 0, 3])


def test_states_that_do_not_come_are_waited_for_no_longer_than_a_while(monkeypatch):
    monkeypatch.setattr(collect, "_LATE_ROWS", 0.01)
    ended = [commit(4, [EOS])], [commit(5, [9, 9], FinishReason.LENGTH)]
    assert heard([commit(3, [9])], *ended) == (PROMPT[:1], [])
    assert heard([commit(3, [9]), block(0, 3)], *ended) == ([*PROMPT, 9], [0, 0, 0])


def test_states_that_a_session_s_end_has_overtaken_are_waited_for(monkeypatch):
    monkeypatch.setattr(collect, "_LATE_ROWS", 3600.0)
    frames = [commit(3, [9])], [commit(4, [EOS])], [commit(5, [9], FinishReason.LENGTH)], [block(0, 3)], [block(3, 1)]
    assert heard(*frames) == ([*PROMPT, 9, EOS], [0, 0, 0, 3])


def test_an_answer_with_a_gap_in_its_states_fails():
    with pytest.raises(Overloaded, match="dropped on the way"):
        heard([commit(3, [9]), block(0, 3)], [commit(4, [9]), commit(5, [9]), block(4, 1)])
