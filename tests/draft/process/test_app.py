"""The draft service as a process: refusals, the handshake, a stream of proposals, and NGRAM without JAX."""

import contextlib
import subprocess
import sys

import grpc
import numpy as np
import pytest

from outrider import PROTOCOL_VERSION
from outrider.config import DraftConfig, to_argv
from outrider.errors import ConfigError
from outrider.serving.messages import Message
from outrider.speculation.proposal import Commit, path_hash
from outrider.wire import codec
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc
from services.draft.process import app
from services.draft.process.checkpoints import vocab_limit
from tests.support.draft.helpers import request
from tests.support.tiny import VOCAB, write_model, write_tokenizer

REFUSALS = {
    "NONE": (["--speculative-algorithm", "NONE"], "needs no draft service"),
    "no model": (["--speculative-algorithm", "STANDALONE"], "needs --speculative-draft-model-path"),
    "no folder": (
        [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/no/such/folder"),
            "--require-draft",
        ],
        "there is no folder",
    ),
    "long window": (["--speculative-ngram-max-match-window-size", "18"], "windows must satisfy"),
    "no window": (["--speculative-ngram-min-match-window-size", "0"], "windows must satisfy"),
    "short branch": (["--speculative-ngram-branch-length", "1"], "must be 2 or more"),
    "breadth": (["--speculative-ngram-min-bfs-breadth", "11"], "breadths must satisfy"),
    "beside itself": (["--speculative-ngram-beside"], "leave it out with --speculative-algorithm NGRAM"),
    "capacity": (["--speculative-ngram-capacity", "0"], "--speculative-ngram-capacity must be 1 or more"),
    "large capacity": (
        ["--speculative-ngram-capacity", str(1 << 32)],
        "--speculative-ngram-capacity must be 2147483648",
    ),
    "corpus, no budget": (["--speculative-ngram-external-corpus-path", "/x"], "sam-budget of 1 or more"),
    "corpus, no target": (
        ["--speculative-ngram-external-corpus-path", "/x", "--speculative-ngram-external-sam-budget", "4"],
        "needs --model-path",
    ),
    "corpus, large budget": (
        ["--speculative-ngram-external-corpus-path", "/x", "--speculative-ngram-external-sam-budget", "12"],
        "at most the 11 nodes",
    ),
    "corpus, no file": (
        [
            *("--speculative-algorithm", "NGRAM", "--model-path", "default"),
            *("--speculative-ngram-external-corpus-path", "/no/such/file"),
            *("--speculative-ngram-external-sam-budget", "4"),
        ],
        "there is no text at /no/such/file",
    ),
    "corpus, no NGRAM": (
        [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/x"),
            *("--speculative-ngram-external-corpus-path", "/x"),
        ],
        "needs NGRAM",
    ),
    "quantization": (["--speculative-draft-model-quantization", "int7"], "int7 is not supported"),
    "rows": (["--speculative-num-draft-tokens", "1"], "counts the root"),
    "cores": (["--cores", "99999"], "may not use core"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_and_code_2(name, capsys):
    flags, message = REFUSALS[name]
    assert app.main([*flags, "--log-level", "error"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("error: ")


def test_missing_weights_are_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = DraftConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder))
    with pytest.raises(ConfigError, match="has no weights"):
        app.build(config)


def test_cache_smaller_than_a_session_is_refused(tmp_path):
    config = DraftConfig(
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(write_model(tmp_path / "model")),
        draft_max_total_tokens=64,
    )
    with pytest.raises(ConfigError, match="--draft-max-total-tokens must be 80 or more"):
        app.build(config)


def test_vocab_limit_excludes_padding(tmp_path):
    folder = write_model(tmp_path / "model", vocab=VOCAB + 64)
    assert vocab_limit(folder) >= VOCAB + 64
    write_tokenizer(folder)
    assert vocab_limit(folder) == VOCAB


def test_insert_prompts_can_be_switched_off():
    config = DraftConfig(speculative_ngram_insert_prompts=False)
    assert to_argv(config) == ["--no-speculative-ngram-insert-prompts"]


@contextlib.contextmanager
def service(address, *flags):
    process = subprocess.Popen([sys.executable, "-m", "services.draft", "--listen", address, *flags])
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
            yield draft_pb2_grpc.DraftServiceStub(channel)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_a_stream_of_proposals(tmp_path):
    tokens = [10, 11, 12, 13] * 6
    with service(f"unix:{tmp_path}/draft.sock") as stub:
        info = stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), wait_for_ready=True)
        assert (info.protocol_version, list(info.drafters)) == (PROTOCOL_VERSION, ["NGRAM"])
        assert not info.HasField("model")

        import queue

        frames = queue.Queue()
        answers = stub.Propose(iter(frames.get, None))
        frames.put(codec.propose_request_to_pb(Message(opens=[request(7, tokens)])))
        # A frame may hold the load alone, if the engine was idle before the session was opened.
        proposal = next(p for frame in answers for p in codec.propose_response_from_pb(frame).proposals)
        assert (proposal.session_id, proposal.anchor_length) == (7, len(tokens))
        assert proposal.anchor_hash == path_hash(np.array(tokens))
        assert proposal.tokens[:3].tolist() == [10, 11, 12]
        gap = Commit(7, len(tokens) + 1, np.array([1], np.uint32), 0)
        frames.put(codec.propose_request_to_pb(Message(commits=[gap])))
        for frame in answers:
            if failures := codec.propose_response_from_pb(frame).failures:
                assert failures[0].session_id == 7
                break
        frames.put(None)
        answers.cancel()


def test_ngram_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None; from services.draft.process.app import build; "
        "from outrider.config import DraftConfig; build(DraftConfig())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
