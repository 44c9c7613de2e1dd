"""Fake engines behind the real loop, streams and gRPC server, and the gateway as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from outrider import PROTOCOL_VERSION
from outrider.config.access.callers import ADMIN_KEYS_VARIABLE
from outrider.service_token import token_check
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import statuses
from outrider.transport.stream import StreamHub
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.gateway.engines import CONTEXT, EOS, VOCAB, FakeDraft, FakeEngine, FakeTarget, tokenizer_files
from tests.support.gateway.forked import ForkedGateway


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=60.0):
    """Wait until a condition holds; returns its value. seconds: what a busy machine may need many times over."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.1)  # so that long waits leave the cores to what they wait for
    return value


def metric_of(page, name, **labels):
    """Sum of the samples of a metric with these labels in a page of /metrics."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return sum(float(v) for k, v in rows if k.split("{")[0] == name and all(w in k for w in wanted))


def model_info(**changes: Any) -> common_pb2.ModelInfo:
    facts = {
        "model_path": "counting", "fingerprint": "f1", "architecture": "Counting", "vocab_size": VOCAB,
        "vocab_hash": "v1", "context_length": CONTEXT, "dtype": "float32",
    }  # fmt: skip
    return common_pb2.ModelInfo(**(facts | changes))


class Target(target_pb2_grpc.TargetServiceServicer):
    engine_class = FakeTarget
    coders = (codec.verify_request_from_pb, codec.verify_response_to_pb)
    name = "outrider.wire.v1.TargetService"

    def __init__(self, hub, model, files=None, first=""):
        self.hub, self.model, self.files = hub, model, tokenizer_files() if files is None else files
        self.first = first

    def register(self, server):
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def GetTargetInfo(self, request, context):
        return target_pb2.GetTargetInfoResponse(
            protocol_version=PROTOCOL_VERSION, software_version="0", model=self.model, eos_token_ids=[EOS],
            max_session_tokens=CONTEXT, max_running_sessions=64, max_draft_tokens=8, page_size=16,
            first_fingerprint=self.first,
        )  # fmt: skip

    async def GetTokenizer(self, request, context):
        for name, content in self.files.items():
            for start in range(0, len(content), 5000):
                yield target_pb2.GetTokenizerResponse(file_name=name, content=content[start : start + 5000])

    async def PauseGeneration(self, request, context):
        self.hub.engine.engine.held = True
        return target_pb2.PauseGenerationResponse()

    async def ContinueGeneration(self, request, context):
        self.hub.engine.engine.held = False
        self.hub.engine.submit(Message())  # wakes the engine
        return target_pb2.ContinueGenerationResponse()

    async def Verify(self, request_iterator, context):
        async with statuses(context):
            await self.hub.answer(context, target_pb2.VerifyRequest)


class Draft(draft_pb2_grpc.DraftServiceServicer):
    engine_class = FakeDraft
    coders = (codec.propose_request_from_pb, codec.propose_response_to_pb)
    name = "outrider.wire.v1.DraftService"

    def __init__(self, hub, model):
        self.hub, self.model = hub, model

    def register(self, server):
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetDraftInfo(self, request, context):
        return draft_pb2.GetDraftInfoResponse(
            protocol_version=PROTOCOL_VERSION, software_version="0", drafters=["COUNTING"], model=self.model,
            max_running_sessions=64,
        )  # fmt: skip

    async def Propose(self, request_iterator, context):
        async with statuses(context):
            await self.hub.answer(context, draft_pb2.ProposeRequest)


class Service:
    """A fake service in a thread of its own. `stop` tears its streams down as a crash does; `start` brings it back."""

    def __init__(self, kind, address, *, delay=0.0, tls=None, token=None, files=None, first=None, **facts):
        """files, first: of a target, tokenizer files and the fingerprint that it began with. facts: of the model."""
        self.kind, self.address, self.delay, self.tls, self.token = kind, address, delay, tls, token
        options = {"files": files, "first": first}
        self.facts, self.options = facts, {name: value for name, value in options.items() if value is not None}
        self.engine: FakeEngine

    def start(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(60)
        return self

    def stop(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self, ready):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.engine = self.kind.engine_class(self.delay)
        loop = EngineLoop(lambda _: None)
        hub = StreamHub(loop, *self.kind.coders)
        server = self.server = GrpcServer(check=token_check(self.token))
        self.kind(hub, model_info(**self.facts), **self.options).register(server.server)
        await server.start(self.address, (self.kind.name,), self.tls)
        await hub.acceptor.open(self.address)
        loop.start(self.engine, hub.publish)
        await server.set_serving(True)
        ready.set()
        await self._end.wait()
        await hub.acceptor.close()
        await server.stop(0)
        await asyncio.to_thread(loop.stop)

    @property
    def running(self):
        """True between `start` and `stop`."""
        return self._thread.is_alive()

    @property
    def sessions(self):
        return len(self.engine.sessions)


ADMIN = "for-tests"


class Gateway:
    """A gateway in a process of its own, with a client. admin: headers of an administrator."""

    admin = {"authorization": f"Bearer {ADMIN}"}  # noqa: RUF012

    def __init__(self, folder: Path, targets, drafts=(), *, self_test=False, verify=None, admin_key=ADMIN, **flags):
        """targets: None for those of a file of models. verify: SSLContext of the client, for a gateway with a
        certificate. admin_key: in its environment.
        """
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"{'http' if verify is None else 'https'}://127.0.0.1:{self.port}"
        self.log = folder / f"gateway-{self.port}.log"
        settings = {"port": self.port, "grpc-port": self.grpc_port} | flags
        argv = ["--target", *targets] if targets is not None else []
        argv += ["--draft", *drafts] if drafts else []
        argv += [] if self_test else ["--disable-draft-self-test"]
        for name, value in settings.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            argv += [f"--{name.replace('_', '-')}", *map(str, values)]
        self.process = ForkedGateway(argv, self.log, {**os.environ, ADMIN_KEYS_VARIABLE: admin_key})
        self.client = httpx.Client(base_url=self.url, timeout=30, verify=True if verify is None else verify)

    def healthy(self):
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").json()["status"] == "ok"  # the draft is up, too
        assert self.process.poll() is None, self.log.read_text()
        return False

    def wait(self):
        until(self.healthy, seconds=120)  # a process starts slowly on a loaded machine
        return self

    def metric(self, name, **labels):
        """As of metric_of."""
        return metric_of(self.client.get("/metrics").text, name, **labels)

    def complete(self, prompt, **options):
        body = {"model": "default", "prompt": prompt, "temperature": 0, **options}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt, **options):
        return self.complete(prompt, **options)["choices"][0]["text"]

    def stop(self):
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()
        return code


def answers(gateway, path):
    """The status of a path; None if the gateway does not listen yet."""
    with contextlib.suppress(httpx.TransportError):
        return gateway.client.get(path).status_code


def refused(*flags, code=2):
    """The error output of a gateway that ends at its start with this exit code."""
    argv = ["--port", str(free_port()), "--grpc-port", str(free_port()), *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = ForkedGateway(argv, log, os.environ)
        try:
            assert process.wait(60) == code, log.read_text()
        finally:
            process.kill()
        assert "Traceback" not in log.read_text()
        return log.read_text()
