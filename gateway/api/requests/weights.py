"""Bodies of the routes that change weights, as SGLang's clients send them."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from gateway.api.requests.fields import Count, Items
from outrider.errors import InvalidRequest
from outrider.wire.v1 import common_pb2, target_pb2

_FORMATS = (None, "auto", "safetensors")
_PICKLED_FORMATS = (None, "auto", "direct", "flattened_bucket")  # the pickle itself shows which of the two forms it has
_BROADCAST_FORMATS = (None, "auto", "flattened_bucket")
_MAX_TENSORS = 1 << 14  # of a broadcast; their names fit into a message
_MAX_JSON = 1 << 16  # bytes of a body beside the tensors
_QUAD_BYTES = 1 << 20  # of base64 that are decoded at a time, a multiple of 4


class UpdateBody(BaseModel):
    """Options of all update_weights_* routes."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: str | None = None

    def update(self, formats: tuple[str | None, ...] = _FORMATS) -> common_pb2.WeightUpdate:
        """The options as a message. formats: supported values of `load_format`. Raises InvalidRequest."""
        if self.load_format not in formats:
            raise InvalidRequest(
                f"`load_format` {self.load_format} is not supported; leave it out", param="load_format"
            )
        update = common_pb2.WeightUpdate(keep_cache=not self.flush_cache, abort_all_requests=self.abort_all_requests)
        if self.weight_version is not None:
            update.weight_version = self.weight_version
        return update


class DiskBody(UpdateBody):
    """POST /update_weights_from_disk."""

    model_path: str = Field(min_length=1)


class TensorBody(UpdateBody):
    """POST /update_weights_from_tensor as JSON. serialized_named_tensors: a pickle in base64 for each rank.

    The first one is used: each has whole tensors, and differs from the others in the device that they are on.
    """

    serialized_named_tensors: Items[str] = Field(min_length=1, max_length=1024)

    def pickled_update(self) -> common_pb2.WeightUpdate:
        """The options as a message. Raises InvalidRequest."""
        return self.update(_PICKLED_FORMATS)

    async def pickle(self) -> AsyncIterator[bytes]:
        """The pickle, in parts. Raises InvalidRequest."""
        text = self.serialized_named_tensors[0]
        for start in range(0, len(text), _QUAD_BYTES):
            try:
                part = binascii.a2b_base64(text[start : start + _QUAD_BYTES], strict_mode=True)
            except ValueError as error:
                raise InvalidRequest(f"it is no base64: {error}", param="serialized_named_tensors.0") from None
            yield part
            await asyncio.sleep(0)


class LabelBody(BaseModel):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class BeginBody(BaseModel):
    """POST /begin_weight_update. selector: whose weights are updated; drafts follow the targets in any case."""

    selector: Literal["all", "target"] = "all"


class GroupBody(BaseModel):
    """POST /destroy_weights_update_group."""

    group_name: str = Field("weight_update_group", min_length=1, max_length=256)


class JoinBody(GroupBody):
    """POST /init_weights_update_group. rank_offset: of the first target in the group; the trainer has rank 0."""

    master_address: str = Field(min_length=1, max_length=256)
    master_port: Count = Field(gt=0, lt=1 << 16)
    rank_offset: Count = Field(ge=1, lt=1 << 20)
    world_size: Count = Field(ge=2, lt=1 << 20)
    backend: Literal["nccl", "gloo"] = "nccl"

    def request(self) -> target_pb2.JoinWeightsGroupRequest:
        """As a message to a target."""
        return target_pb2.JoinWeightsGroupRequest(
            group_name=self.group_name, address=self.master_address, port=self.master_port, rank=self.rank_offset,
            world_size=self.world_size, backend=self.backend,
        )  # fmt: skip


class DistributedBody(UpdateBody, GroupBody):
    """POST /update_weights_from_distributed: what the trainer broadcasts at the same time."""

    names: Items[str] = Field(min_length=1, max_length=_MAX_TENSORS)
    dtypes: Items[str]
    shapes: Items[Annotated[list[Annotated[Count, Field(ge=0, lt=1 << 48)]], Field(max_length=8)]]

    def request(self) -> target_pb2.UpdateWeightsFromGroupRequest:
        """As a message to a target. Raises InvalidRequest."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequest("`names`, `dtypes` and `shapes` need as many entries", param="names")
        if len(set(self.names)) < len(self.names):
            raise InvalidRequest("a tensor is named twice", param="names")
        tensors = [
            target_pb2.TensorFacts(name=name, dtype=dtype.removeprefix("torch."), shape=shape)
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        return target_pb2.UpdateWeightsFromGroupRequest(
            update=self.update(_BROADCAST_FORMATS), group_name=self.group_name, tensors=tensors,
            flattened=self.load_format == "flattened_bucket",
        )  # fmt: skip


async def parts_of(request: Request) -> AsyncIterator[bytes]:
    """The body in parts. Raises InvalidRequest if its sender goes away."""
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect:
        raise InvalidRequest("the connection ended before all tensors had arrived, so nothing has changed") from None


async def tensor_body(request: Request, max_update_bytes: int) -> TensorBody:
    """The parsed body. max_update_bytes: of a pickle. Raises InvalidRequest, RequestValidationError."""
    limit = 2 * max_update_bytes + _MAX_JSON  # base64 takes four letters for three bytes
    content = bytearray()
    async for part in parts_of(request):
        content += part
        if len(content) > limit:
            raise InvalidRequest(
                f"the body has more than {limit} bytes, which all weights of this model need at most; send fewer "
                "tensors at a time, or a safetensors file"
            )
    try:
        found = await asyncio.to_thread(orjson.loads, content)
        return TensorBody.model_validate(found)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no valid JSON: {error}") from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None
