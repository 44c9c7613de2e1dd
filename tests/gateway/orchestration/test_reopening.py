"""Sessions that are opened again, with links without services: no text is lost, repeated or mixed."""

import asyncio

import numpy as np
import pytest

from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.target_relay import COMMITS_AT_ONCE
from gateway.streams.draft import DraftLink
from gateway.streams.features import Features
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.errors import Unavailable
from outrider.speculation.proposal import Commit, FinishReason, path_hash
from outrider.speculation.sampling import SamplingParams
from outrider.wire.codec import commits_from_pb, commits_to_pb
from outrider.wire.opens import open_from_pb
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.gateway.requests import request_for
from tests.support.gateway.streaming import PROMPT


async def test_sessions_fail_once_no_target_has_come_back_in_time():
    target = TargetLink("unix:/nowhere")
    orchestrator = Orchestrator([target], [], Metrics(), resume_timeout=0.05)
    target.up = True
    session = orchestrator.sessions.open(request_for(PROMPT, 5))
    assert session.target is target
    target.up = False
    target.events.down()
    waiting = orchestrator.sessions.open(request_for(PROMPT, 5))
    assert session.target is waiting.target is None
    for one in (session, waiting):
        with pytest.raises(Unavailable, match="came back"):
            await one.inbox.next()
    assert not orchestrator.sessions.by_id
    with pytest.raises(Unavailable):
        orchestrator.sessions.open(request_for(PROMPT, 5))
    target.up = True
    target.events.up()
    assert orchestrator.sessions.open(request_for(PROMPT, 5)).target is target
    assert target.load.session_count == 1


async def test_a_session_fails_after_repeated_losses():
    """It may be what ends them; others go on, and so does one that had a token in between."""
    target = TargetLink("unix:/nowhere")
    orchestrator = Orchestrator([target], [], Metrics())
    target.up = True
    poison, other = (orchestrator.sessions.open(request_for(PROMPT, 50)) for _ in range(2))
    for _ in range(6):
        assert other.target is target
        other.commit([7], 0, 0, FinishReason.RUNNING)
        target.up = False
        target.events.down()
        target.up = True
        target.events.up()
    assert other.target is target
    with pytest.raises(Unavailable, match="5 times a target was lost that had this request"):
        await poison.inbox.next()
    orchestrator.sessions.close(other)
    assert not orchestrator.sessions.by_id


async def send_commit(target, session, base, tokens, root_hash=0):
    """Receive a target's frame with one commit."""
    batch = commits_to_pb([Commit(session.id, base, np.array(tokens, np.uint32), root_hash)])
    await target.stream.on_frame(target_pb2.VerifyResponse(commits=batch))


async def test_diverging_runs_of_a_session_are_never_mixed():
    """Of a session that was opened twice on a target whose rounding depends on what stands beside a row."""
    target = TargetLink("unix:/nowhere")
    target.up = True
    orchestrator = Orchestrator([target], [], Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 20))

    async def commit(text, tokens):
        await send_commit(target, session, len(text), tokens, path_hash(np.array([*text, *tokens])))
        return [open_from_pb(request).tokens.tolist() for request in target.take_frame().opens]

    target.take_frame()
    assert await commit([1, 2], [3, 4]) == []
    session.reopening.start(session.tokens)  # opened anew with these tokens, while the old run goes on
    assert await commit([1, 2, 3, 4], [5, 6]) == []
    assert await commit([1, 2, 3, 4], [5]) == []
    assert await commit([1, 2, 3, 4, 5], [9, 8]) == [[1, 2, 3, 4, 5, 6]], "the client has 6"
    assert await commit([1, 2, 3, 4, 5, 9], [8]) == []
    assert await commit([1, 2, 3, 4, 5, 9, 8], [7]) == [], "it is sent once"
    assert await commit([1, 2, 3, 4, 5, 6], [7, 8]) == []
    assert await commit([1, 2, 3, 4, 5, 6, 7, 8], [9]) == []
    assert session.tokens == list(range(1, 10))
    assert await commit([1, 2, 3, 4, 5, 6, 7, 0, 9], [9]) == [list(range(1, 10))], "of as many tokens, but of others"
    assert session.tokens == list(range(1, 10))


async def test_a_session_that_cannot_be_encoded_leaves_nothing_behind():
    """One whose request does not fit on the wire would be in the way whenever a service came back."""
    target, draft = TargetLink("unix:/nowhere"), DraftLink("unix:/nowhere", common_pb2.ModelInfo())
    target.up = draft.up = True
    orchestrator = Orchestrator([target], [draft], Metrics())
    with pytest.raises(ValueError, match="out of range"):
        orchestrator.sessions.open(request_for([1, 2], 20, sampling=SamplingParams(top_k=2**40)))
    assert not orchestrator.sessions.by_id
    assert (target.load.session_count, draft.load.session_count) == (0, 0)
    for link in (target, draft):
        link.events.down()
        link.events.up()


async def test_commits_that_overlap_are_skipped_and_gaps_open_the_session_again():
    target = TargetLink("unix:/nowhere")
    target.up = True
    orchestrator = Orchestrator([target], [], Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 9))

    await send_commit(target, session, 2, [3, 4])
    await send_commit(target, session, 2, [3, 4])
    await send_commit(target, session, 3, [4, 5])
    assert session.tokens == [1, 2, 3, 4, 5]
    assert (await session.inbox.next()).tokens == [3, 4, 5]
    target.take_frame()
    await send_commit(target, session, 7, [8])
    assert session.tokens == [1, 2, 3, 4, 5]
    (request,) = target.take_frame().opens
    assert open_from_pb(request).tokens.tolist() == [1, 2, 3, 4, 5]
    assert request.prompt_length == 2


@pytest.mark.parametrize(("code", "targets"), [(8, 2), (14, 2), (14, 1), (3, 1)])
async def test_a_session_opened_twice_leaves_no_run_behind(code, targets):
    """The first run fails while the second one is being asked for, which may succeed: that of a full target, say."""
    links = [TargetLink(f"unix:/target{i}") for i in range(targets)]
    for link in links:
        link.up = True
    orchestrator = Orchestrator(links, [], Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 9))
    first = session.target
    first.take_frame()
    session.reopening.start(session.tokens)
    orchestrator.sessions.reopen(session)
    if targets > 1:
        first.take_frame()
        first.load.session_count += 9  # of others: the next one is opened elsewhere
    error = common_pb2.SessionError(session_id=session.id, code=code, message="no")
    await first.stream.on_frame(target_pb2.VerifyResponse(errors=[error]))
    goes_on = session.target is first
    assert goes_on == (code == 14 and targets == 1)
    frame = first.take_frame()
    assert np.frombuffer(frame.closes, "<u8").tolist() == ([] if goes_on else [session.id])
    if targets > 1:
        assert [request.session_id for request in session.target.take_frame().opens] == [session.id]


def test_reopening_drops_an_earlier_close():
    target = TargetLink("unix:/nowhere")
    for name in (1, 2):
        target.close(name)
    target.open(common_pb2.OpenSession(session_id=1))
    assert np.frombuffer(target.take_frame().closes, "<u8").tolist() == [2]
    target.open(common_pb2.OpenSession(session_id=1))
    target.close(1)
    assert np.frombuffer(target.take_frame().closes, "<u8").tolist() == [1]


@pytest.mark.parametrize("lost", [False, True], ids=["comes", "loses track"])
async def test_a_draft_opened_during_delivery_receives_the_whole_frame(lost):
    """Sessions receive a frame one after the other; one that is opened on a draft meanwhile lacks the rest of it."""
    target, draft = TargetLink("unix:/nowhere"), DraftLink("unix:/nowhere", common_pb2.ModelInfo())
    target.up, draft.up = True, lost
    orchestrator = Orchestrator([target], [draft], Metrics())
    sessions = [orchestrator.sessions.open(request_for([1, 2], 9)) for _ in range(COMMITS_AT_ONCE + 2)]
    batch = commits_to_pb([Commit(session.id, 2, np.array([3, 4], np.uint32), 0) for session in sessions])
    draft.take_frame()
    delivery = asyncio.create_task(target.stream.on_frame(target_pb2.VerifyResponse(commits=batch)))
    while len(sessions[0].tokens) == 2:
        await asyncio.sleep(0)
    assert sessions[-1].tokens == [1, 2]
    if lost:
        draft.take_frame()
        errors = [common_pb2.SessionError(session_id=sessions[-1].id, code=14, message="lost track")]
        await draft.stream.on_frame(draft_pb2.ProposeResponse(errors=errors))
    else:
        draft.up = True
        draft.events.up()
    await delivery
    frame = draft.take_frame()
    known = {request.session_id: open_from_pb(request).tokens.tolist() for request in frame.opens}
    for commit in commits_from_pb(frame.commits):
        tokens = known.get(commit.session_id, [])
        tokens += commit.tokens.tolist()[len(tokens) - commit.base_length :]
    assert known == {session.id: [1, 2, 3, 4] for session in (sessions[-1:] if lost else sessions)}


async def test_commits_go_to_the_drafts_of_their_sessions():
    """Also once a session has moved to another draft."""
    target = TargetLink("unix:/nowhere")
    drafts = [DraftLink("unix:/nowhere", common_pb2.ModelInfo()) for _ in range(2)]
    for link in (target, *drafts):
        link.up = True
    orchestrator = Orchestrator([target], drafts, Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 9))
    for length in (2, 3):
        for draft in drafts:
            draft.take_frame()
        batch = commits_to_pb([Commit(session.id, length, np.array([7], np.uint32), 0)])
        await target.stream.on_frame(target_pb2.VerifyResponse(commits=batch))
        assert [bool(draft.take_frame().commits.session_ids) for draft in drafts] == [
            draft is session.draft for draft in drafts
        ]
        session.draft.up = False
        session.draft.events.down()


@pytest.mark.parametrize(("tokens", "goes_on"), [(8, False), (300, True)])
async def test_rare_failures_of_a_draft_are_forgiven(tokens, goes_on):
    """One that does so whenever it has been opened is not: each time it would read the whole text again."""
    target, draft = TargetLink("unix:/nowhere"), DraftLink("unix:/nowhere", common_pb2.ModelInfo())
    target.up = draft.up = True
    orchestrator = Orchestrator([target], [draft], Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 4000))
    error = common_pb2.SessionError(session_id=session.id, code=14, message="lost track")
    for _ in range(12):
        await send_commit(target, session, len(session.tokens), [3] * tokens)
        await draft.stream.on_frame(draft_pb2.ProposeResponse(errors=[error]))
    assert (session.draft is draft) == goes_on


@pytest.mark.parametrize(("limit", "known", "again"), [(0, True, True), (2, True, False), (0, False, False)])
async def test_hidden_states_are_recomputed_only_if_the_draft_can_use_them(limit, known, again):
    """Not a session that is longer than the draft follows, nor one on a target that has no such states."""
    target, draft = TargetLink("unix:/nowhere"), DraftLink("unix:/nowhere", common_pb2.ModelInfo())
    target.up = True
    orchestrator = Orchestrator([target], [draft], Metrics())
    session = orchestrator.sessions.open(request_for([1, 2], 9))
    target.take_frame()
    draft.features = Features(common_pb2.FeatureSpec(spec_id=5), ())
    draft.info = draft_pb2.GetDraftInfoResponse(drafters=["NGRAM", "EAGLE3"], max_session_tokens=limit)
    target.features.known = {5} if known else set()
    draft.up = True
    draft.events.up()
    assert session.draft is draft
    assert [request.feature_spec for request in target.take_frame().opens] == ([5] if again else [])
    assert session.reopening.active == again
