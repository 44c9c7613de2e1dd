"""Facts about the gateway and its services."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict

import outrider
from gateway.control.health import Health
from gateway.orchestration.generator import Generator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.speculation.draft_source import SourceKind
from outrider.wire.v1 import target_pb2


@dataclass(frozen=True)
class Facts:
    """Flags of a model, the model with its tokenizer's files, and the other workers."""

    config: GatewayConfig
    target: target_pb2.GetTargetInfoResponse
    peers: Peers = field(default_factory=Peers)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Software version."""
        return outrider.__version__

    @property
    def fingerprint(self) -> str:
        """Changes with the software, the checkpoint and the number formats, because each can change texts."""
        model = self.target.model
        key = f"{self.version}:{model.fingerprint}:{model.dtype}:{self.target.kv_cache_dtype}"
        return "outrider-" + hashlib.sha256(key.encode()).hexdigest()[:10]

    def health(self, generator: Generator) -> Health:
        """The state of the gateway and its services."""
        return Health(generator.orchestrator, generator.admission, self.config.draft_reports())

    def server_info(self, generator: Generator) -> dict[str, Any]:
        """Flags, services and speculation statistics; keys that SGLang has keep SGLang's names."""
        orchestrator, tally, health = generator.orchestrator, generator.metrics.tally, self.health(generator)
        return {
            **{name: value for name, value in asdict(self.config).items() if "api_key" not in name},
            "version": self.version,
            "served_model_name": generator.name,
            "model_path": self.target.model.model_path,
            "context_length": generator.max_session_tokens,
            "dtype": self.target.model.dtype,
            "weight_version": self.target.weight_version,
            **self._parallel(orchestrator.targets),
            "targets": [_service(link, health) for link in orchestrator.targets],
            "drafts": [_service(link, health) for link in orchestrator.drafts],
            "draft_sources": self._draft_sources(generator),
            "internal_states": [
                {
                    "avg_spec_accept_length": tally.accept_length,
                    "avg_spec_accept_rate": tally.acceptance_rate,
                    "running_sessions": len(orchestrator.sessions.by_id),
                }
            ],
        }

    def _parallel(self, targets: Sequence[TargetLink]) -> dict[str, Any]:
        """What trainers read: the places that all targets take in a process group, and the ranks of one target."""
        ranks = [max(link.info.ranks, 1) if link.info is not None else 1 for link in targets]
        return {
            "tp_size": max(ranks, default=1),
            "pp_size": 1,
            "num_gpus": sum(ranks),
            "disaggregation_mode": "null",
            "enable_memory_saver": False,
        }

    def _draft_sources(self, generator: Generator) -> dict[str, Any]:
        """The draft service and the target's own draft sources: which of them run, and their draft tokens so far."""
        orchestrator, counts = generator.orchestrator, generator.metrics.tally.sources
        running = {
            int(source) for link in orchestrator.targets if link.up and link.info for source in link.info.draft_sources
        }
        if any(link.up for link in orchestrator.drafts):
            running.add(int(SourceKind.DRAFT))
        return {
            kind.label: {
                "name": kind.title,
                "self_speculation": kind.in_target,
                "running": int(kind) in running,
                "verified_draft_tokens": counts.get(kind, (0, 0))[0],
                "accepted_draft_tokens": counts.get(kind, (0, 0))[1],
            }
            for kind in SourceKind
        }


def _service(link: TargetLink | DraftLink, health: Health) -> dict[str, Any]:
    info = MessageToDict(link.info, preserving_proto_field_name=True) if link.info is not None else {}
    found = health.availability(link)
    stream = {"stream_transport": link.stream.transport} if link.up else {}
    state = {"state": found.state, "reason": found.reason or None}
    weights = {"weights": link.weights._asdict()} if isinstance(link, DraftLink) and link.weights is not None else {}
    return {"address": link.address, "up": link.up, **state, **stream, **weights, **info}
