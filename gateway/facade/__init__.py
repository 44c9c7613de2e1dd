"""gRPC services of vLLM and SGLang on the gateway's port, so that routers for them can use the gateway as a worker."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.facade.backend import Backend
from gateway.facade.base import Facade
from gateway.facade.sglang import SglangFacade
from gateway.facade.vllm import VllmFacade
from outrider.config.gateway import GrpcFacade

__all__ = ["Backend", "Facade", "facades"]

_KINDS: dict[GrpcFacade, type[Facade]] = {"vllm": VllmFacade, "sglang": SglangFacade}


def facades(names: Sequence[GrpcFacade]) -> list[Facade]:
    """One facade for each name."""
    return [_KINDS[name]() for name in dict.fromkeys(names)]
