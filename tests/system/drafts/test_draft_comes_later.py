"""`outrider serve` whose draft is missing, crashes or is required: the system serves, and speculates when it can."""

import os
import time

import httpx
import pytest

from tests.support.system.serve import PROMPTS, System, processes_of

pytestmark = pytest.mark.system

TREE = ("--speculative-num-steps", "4", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8")


def cores():
    usable = sorted(os.sched_getaffinity(0))
    return "--cores-target", str(usable[0]), "--cores-draft", str(usable[-1])


def state(system):
    body = httpx.get(f"{system.url}/health", timeout=10)
    return body.status_code, body.json()


def speculates(system, seconds=90):
    """Draft tokens are accepted within a time; the text stays the same."""
    first = system.ask_all()
    deadline = time.monotonic() + seconds
    while not system.metric("outrider_accepted_draft_tokens_total"):
        assert time.monotonic() < deadline, "no draft token was accepted"
        assert system.ask_all() == first


@pytest.mark.long
def test_a_draft_model_that_appears_later_is_used_without_a_restart(folder, draft_folder, tmp_path):
    later = tmp_path / "later"
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(later))
    system = System(folder, *flags, *TREE, *cores()).wait(state="degraded")
    try:
        deadline = time.monotonic() + 60
        while (found := state(system))[1]["drafts"][0]["state"] != "failed":
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        status, body = found
        assert status == 200
        assert f"there is no folder {later}" in body["drafts"][0]["reason"]
        assert httpx.get(f"{system.url}/health/ready").status_code == 200
        assert len(system.ask(PROMPTS[0])) > 0
        assert system.metric("outrider_accepted_draft_tokens_total") == 0
        before = [processes_of(system.process, role) for role in ("target", "draft", "gateway")]
        partial = tmp_path / "partial"
        partial.mkdir()
        for file in draft_folder.iterdir():
            (partial / file.name).write_bytes(file.read_bytes())
        partial.rename(later)
        system.wait()
        speculates(system)
        assert before == [processes_of(system.process, role) for role in ("target", "draft", "gateway")]
    finally:
        assert system.stop() == 0


@pytest.mark.long
def test_a_draft_that_crashes_again_and_again_stops_nothing(folder, draft_folder, tmp_path, monkeypatch):
    """The draft process aborts at its start while a file exists."""
    mark = tmp_path / "crash"
    mark.touch()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if sys.orig_argv[-1:] and 'draft' in sys.orig_argv[1:6] and os.path.exists({str(mark)!r}):\n"
        "    os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft_folder))
    system = System(folder, *flags, *TREE, *cores()).wait(state="degraded")
    try:
        assert "SIGABRT" in state(system)[1]["drafts"][0]["reason"]
        pids = [processes_of(system.process, role) for role in ("target", "gateway")]
        assert len(system.ask(PROMPTS[0])) > 0
        mark.unlink()
        system.wait()
        speculates(system)
        assert pids == [processes_of(system.process, role) for role in ("target", "gateway")]
    finally:
        assert system.stop() == 0
