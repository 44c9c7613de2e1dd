"""REST bodies: every route answers with a status that names the caller's mistake, or with an answer; never with 500.

The app is the gateway's own. Its sessions are answered at once with tokens of the vocabulary, so that answers are
formatted, too.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.admission.admission import Keys
from gateway.api import app as rest
from gateway.api.middleware import EdgeMiddleware
from gateway.control.control import Control
from gateway.control.models import Models, ServedModel, Serving
from gateway.control.replicas import Replicas
from gateway.control.server_info import Facts
from gateway.orchestration.generator import Generator
from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.session_table import SessionTable
from gateway.pools.discovery import Discovery
from gateway.pools.members import Members
from gateway.sessions.session import Session
from gateway.telemetry.metrics import Metrics
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayConfig
from outrider.errors import Unavailable
from outrider.speculation.proposal import FinishReason
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, target_pb2
from tests.fuzz.choices import Choices, as_json
from tests.support.gateway.engines import CONTEXT, VOCAB, tokenizer_files

_PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/tokenize", "/detokenize")
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_VALUES: dict[str, tuple[Any, ...]] = {
    "messages": ([{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                 [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], []),
    "prompt": ("hi", [1, 2], ["a", "b"], [[1], [2]], [], ""), "input": ("hi", [{"role": "user", "content": "a"}]),
    "text": ("hi", {"format": {"type": "json_object"}}, ["a"]), "input_ids": ([1, 2], [[1], [2]], []),
    "tokens": ([1, 2], [[1]], []), "sampling_params": ({"max_new_tokens": 2}, [{}, {}], {"n": 2}, {"regex": "a"}),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
                        {"type": "text"}, {"type": "structural_tag"}),
    "structured_outputs": ({"json": {"x-guidance": 5}, "disable_any_whitespace": True}, {"choice": [""]}, {"regex": ""},
                           {"grammar": "root ::= \"a\""}, {}),
    "tools": ([_TOOL], [_TOOL, _TOOL], [{"type": "function"}], [{"function": {"name": "f", "parameters": None}}]),
    "tool_choice": ("auto", "required", "none", {"type": "function", "function": {"name": "f"}}),
    "stop": ("a", ["a", "b"], [""], []),
    "speculation": ("off", "auto", "maybe", {"sources": ["draft"]}, {"report": True}),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "logit_bias": ({"1": 5}, {"x": 1}, {}), "model": ("default", "other", ""), "ebnf": ('root ::= "a"', ""),
    "regex": ("a+", ""), "json_schema": ("{}", "{", "5"),
    "guided_choice": (["a"], [], [""]), "chat_template_kwargs": ({"enable_thinking": False}, {"messages": 5}, {}),
    "reasoning": ({"effort": "low"},), "rid": ("x", ["x", "y"], ""),
}  # fmt: skip
_FIELDS = (*_VALUES, "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "temperature", "top_p",
           "top_k", "min_p", "n", "best_of", "stream", "seed", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
           "presence_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "timeout", "priority",
           "truncate_prompt_tokens", "return_token_ids", "skip_special_tokens", "add_special_tokens",
           "continue_final_message", "add_generation_prompt", "parallel_tool_calls", "return_logprob", "cache_salt",
           "user", "suffix", "instructions", "return_tokens_as_token_ids", "include_reasoning", "guided_json",
           "documents")  # fmt: skip


class _Gateway:
    """The app, and the loop in which requests are answered."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._build())

    async def _build(self) -> None:
        info = common_pb2.ModelInfo(model_path="model", fingerprint="f", vocab_size=VOCAB, context_length=CONTEXT)
        facts = Facts(GatewayConfig(target=("unix:/none",)), target_pb2.GetTargetInfoResponse(model=info))
        orchestrator = Orchestrator([], [], Metrics())
        tokenizer = ModelTokenizer(tokenizer_files())
        generator = Generator(
            orchestrator, tokenizer, orchestrator.metrics, name="default", vocab_size=VOCAB, max_session_tokens=CONTEXT,
        )  # fmt: skip
        orchestrator.sessions.open = lambda request, draft=None: _answered(orchestrator.sessions, request)  # type: ignore[method-assign]
        self.edge = EdgeMiddleware(1 << 20)
        replicas = Replicas(Discovery(Members(), 1.0), orchestrator, facts.peers)
        model = ServedModel(["default"], orchestrator.metrics, replicas, facts.health(generator))
        model.running = Serving(generator, facts, Control(orchestrator, facts))
        self.edge.app = rest.build(Models([model], facts.peers, any_model=True), Keys(facts.config))

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        return self.loop.run_until_complete(asyncio.wait_for(self._post(path, body), 10))

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(received, None)
            if message is None:
                await asyncio.Event().wait()
            return message or {}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80),
            "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        await self.edge(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _answered(table: SessionTable, request: Any) -> Session:
    """A session that has ended with some tokens, as a target would have sent them."""
    session = Session(next(table._ids), request)
    table.by_id[session.id] = session
    codec.open_to_pb(session.open_message())
    if request.logprobs is not None or request.prompt_logprobs is not None:
        table.fail(session, Unavailable("no target computes log-probabilities here"))
        return session
    count = min(request.stop.max_tokens, 6)
    tokens = [(request.sampling.seed + 7 * place) % VOCAB for place in range(count)]
    session.commit(tokens, 0, 0, FinishReason.LENGTH)
    table.finish(session)
    return session


_GATEWAY = _Gateway()


def fuzz(data: bytes) -> None:
    """The first byte chooses the route, the next whether the rest is the body or decisions about it."""
    choices = Choices(data)
    path = choices.one(_PATHS)
    body = as_json(_body(choices, path)) if choices.chance(2) else choices.rest()
    status, answer = _GATEWAY.post(path, body)
    if status == 500 or b"internal_error" in answer:
        raise AssertionError(f"{path} answered {status} to {body!r}: {answer!r}")
    if status >= 400 and "message" not in str(json.loads(answer)):
        raise AssertionError(f"{path} answered {status} without a message: {answer!r}")


def seeds() -> list[bytes]:
    """A good body of each route, and decisions."""
    good = (
        {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi", "stream": True},
        {"text": "hi", "sampling_params": {"max_new_tokens": 2}}, {"input": "hi"}, {"prompt": "hi"}, {"tokens": [1, 2]},
    )  # fmt: skip
    return [bytes((route, 0)) + json.dumps(body).encode() for route, body in enumerate(good)] + [
        bytes((route, 1, 3, *range(20))) for route in range(len(good))
    ]


def _body(choices: Choices, path: str) -> Any:
    needed = {
        "/v1/chat/completions": "messages",
        "/generate": "text",
        "/v1/responses": "input",
        "/detokenize": "tokens",
    }
    first = needed.get(path, "prompt")
    body = {first: choices.one(_VALUES[first])}
    for _ in range(choices.below(8)):
        name = choices.one(_FIELDS)
        if name in _VALUES and not choices.chance(6):
            body[name] = choices.one(_VALUES[name])
        elif name in ("response_format", "guided_json", "json_schema") and choices.chance(2):
            body[name] = choices.schema()
        else:
            body[name] = choices.value(2)
    return body
