"""Unreadable frames of a target: other services are not affected, and the target is sent its sessions again."""

import logging

import numpy as np
import pytest

from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.features import Features
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.errors import Unavailable
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, FinishReason, Logprobs, path_hash
from outrider.wire import codec
from outrider.wire.features import features_to_pb
from outrider.wire.v1 import common_pb2, target_pb2
from tests.support.gateway.requests import request_for

PROMPT = [1, 2, 3]


def commit(session_id, tokens, base=3, finish=FinishReason.RUNNING):
    text = np.array([*PROMPT, *range(7, 4 + base), *tokens], np.uint32)
    logprobs = Logprobs(base, *(np.zeros(shape, kind) for shape, kind in ((1, "f4"), ((1, 2), "u4"), ((1, 2), "f4"))))
    new = np.array(tokens, np.uint32)
    return Commit(session_id, base, new, path_hash(text), finish_reason=finish, logprobs=logprobs)


def frame(*commits):
    blocks = [FeatureBlock(commit.session_id, commit.base_length, np.zeros((2, 4), np.uint8), 5) for commit in commits]
    return target_pb2.VerifyResponse(
        commits=codec.commits_to_pb(commits), logprobs=codec.logprobs_to_pb(commits), features=features_to_pb(blocks)
    )


def broken(session_id):
    """Frames that cannot be decoded, by the broken part."""
    for part in ("commits", "logprobs"):
        for name in getattr(frame(commit(1, [7])), part).DESCRIPTOR.fields_by_name:
            bad = frame(commit(session_id, [7]))
            setattr(getattr(bad, part), name, getattr(getattr(bad, part), name)[:-1])
            yield f"{part}.{name}", bad
    bad = frame(commit(session_id, [7]))
    bad.commits.finish_reasons = b"\x09"
    yield "finish reason", bad


class System:
    """An orchestrator with links without services."""

    def __init__(self):
        self.targets = [TargetLink(f"unix:/target{i}") for i in range(2)]
        self.draft = DraftLink("unix:/draft", common_pb2.ModelInfo())
        self.draft.features = Features(common_pb2.FeatureSpec(spec_id=5), ())
        self.orchestrator = Orchestrator(self.targets, [self.draft], Metrics())
        for link in (*self.targets, self.draft):
            link.up = True

    def open(self):
        return self.orchestrator.sessions.open(request_for(PROMPT, 9))

    def unreadable(self, target):
        value = self.orchestrator.metrics.registry.get_sample_value
        return value("outrider_unreadable_frames_total", {"address": target.address})


@pytest.mark.parametrize("what", [name for name, _ in broken(1)])
async def test_an_unreadable_frame_of_a_target_is_dropped_and_its_sessions_reopened(what, caplog):
    system = System()
    session, other = system.open(), system.open()
    bad, good = session.target, other.target
    assert bad is not good
    for link in (bad, good, system.draft):
        link.take_frame()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await bad.stream.on_frame(dict(broken(session.id))[what])
    await good.stream.on_frame(frame(commit(other.id, [7])))
    await bad.stream.on_frame(
        frame(commit(session.id, [8], base=4))
    )  # sent before the target received its sessions again
    opened = bad.take_frame().opens
    assert [(request.session_id, len(request.tokens)) for request in opened] == [(session.id, 12)] * 2
    assert not good.take_frame().opens
    message, failures = codec.propose_request_from_pb(system.draft.take_frame())
    assert ([c.session_id for c in message.commits], failures) == ([other.id, session.id], [])
    assert [system.unreadable(target) for target in (bad, good)] == [2, 0]
    assert len(caplog.messages) == 1
    assert f"target at {bad.address} sends frames that cannot be read" in caplog.messages[0]
    assert (session.tokens, other.tokens) == (PROMPT, [*PROMPT, 7])
    await bad.stream.on_frame(frame(commit(session.id, [7], finish=FinishReason.LENGTH)))
    assert (await session.inbox.next()).tokens == [7]
    assert session.id not in system.orchestrator.sessions.by_id
    system.orchestrator.sessions.close(other)


async def test_a_session_fails_after_repeated_unreadable_frames():
    system = System()
    session = system.open()
    bad = dict(broken(session.id))["commits.root_hashes"]
    target = session.target
    for _ in range(4):
        await target.stream.on_frame(bad)
    assert session.id in system.orchestrator.sessions.by_id
    await target.stream.on_frame(bad)
    with pytest.raises(Unavailable, match="5 times a frame was lost"):
        await session.inbox.next()


@pytest.mark.parametrize("field", common_pb2.FeatureBatch.DESCRIPTOR.fields_by_name)
async def test_unreadable_hidden_states_are_dropped_without_the_frame(field, caplog):
    system = System()
    session = system.open()
    target = session.target
    for link in (target, system.draft):
        link.take_frame()
    bad = frame(commit(session.id, [7]))
    setattr(bad.features, field, getattr(bad.features, field)[:-1])
    with caplog.at_level(logging.WARNING):
        await target.stream.on_frame(bad)
    await target.stream.on_frame(frame(commit(session.id, [8], base=4)))
    assert session.tokens == [*PROMPT, 7, 8]
    assert not target.take_frame().opens
    message, failures = codec.propose_request_from_pb(system.draft.take_frame())
    assert ([block.first for block in message.features], len(message.commits), failures) == ([4], 2, [])
    assert system.unreadable(target) == len(caplog.messages) == 1
    system.orchestrator.sessions.close(session)
