"""Clients of the gateway's facades, through the stubs of the other engines."""

from typing import ClassVar

import grpc
import pytest
from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.support.gateway.engines import tokenizer

A = tokenizer().encode("A").ids


class VllmClient:
    """A client of VllmEngine."""

    pb, limit = vllm_engine_pb2, "max_tokens"
    defaults: ClassVar = {"temperature": 0.0}

    def __init__(self, channel):
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def request(self, prompt=A, *, stream=False, name="", all_logprobs=None, fields=(), **params):
        params = self.defaults | params | _both(all_logprobs)
        return self.pb.GenerateRequest(
            request_id=name, tokenized=self.pb.TokenizedInput(input_ids=prompt), stream=stream,
            sampling_params=self.pb.SamplingParams(**params), **dict(fields),
        )  # fmt: skip

    def ask(self, prompt=A, **options):
        return self.stub.Generate(self.request(prompt, **options), timeout=30)

    def chunks_and_ends(self, *args, **options):
        messages = list(self.ask(*args, **options))
        return [m.chunk for m in messages if m.HasField("chunk")], [
            m.complete for m in messages if m.HasField("complete")
        ]

    def whole(self, *args, **options):
        chunks, ends = self.chunks_and_ends(*args, **options)
        assert not chunks
        return ends[0]

    def seeded(self, seed):
        return {"seed": seed}

    def abort(self, name):
        return self.stub.Abort(self.pb.AbortRequest(request_ids=[name]))


class SglangClient(VllmClient):
    """A client of SglangScheduler."""

    pb, limit = sglang_scheduler_pb2, "max_new_tokens"
    # Unset fields are 0 in its messages.
    defaults: ClassVar = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1}

    def __init__(self, channel):
        self.stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)

    def request(self, prompt=A, *, all_logprobs=None, fields=(), **options):
        fields = dict(fields) | (
            {"return_logprob": True, "top_logprobs_num": all_logprobs} if all_logprobs is not None else {}
        )
        return super().request(prompt, fields=fields, **options)

    def seeded(self, seed):
        return {"custom_params": {"sampling_seed": seed}}

    def abort(self, name):
        return self.stub.Abort(self.pb.AbortRequest(request_id=name))


def _both(count):
    """Fields that request log-probabilities of prompt and answer; none for None."""
    return {"logprobs": count, "prompt_logprobs": count} if count is not None else {}


def refusal(call):
    """Code and message of a refused call."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if hasattr(call, "__iter__") else call()
    return caught.value.code(), caught.value.details()
