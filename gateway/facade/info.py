"""Facts about the model and the load, with the fields that all facades share."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.facade.backend import Backend

_MIN_INTERVAL = 0.5  # seconds over which a rate is measured


def model_facts(backend: Backend) -> dict[str, Any]:
    """Fields of GetModelInfo in all facades."""
    generator, target = backend.generator, backend.facts.target
    config, settings = _settings(backend, "config.json"), generator.tokenizer.settings
    return {
        "model_path": target.model.model_path,
        "tokenizer_path": target.model.model_path,
        "served_model_name": generator.name,
        "is_generation": True,
        "max_context_length": generator.max_session_tokens,
        "max_req_input_len": generator.max_session_tokens - 1,
        "vocab_size": target.model.vocab_size,
        "model_type": str(config.get("model_type", "")),
        "architectures": [target.model.architecture],
        "eos_token_ids": target.eos_token_ids,
        "pad_token_id": _id_of(backend, settings.get("pad_token")),
        "bos_token_id": _id_of(backend, settings.get("bos_token")),
    }


def _settings(backend: Backend, name: str) -> dict[str, Any]:
    found = json.loads(backend.files.get(name, b"{}"))
    return found if isinstance(found, dict) else {}


def _id_of(backend: Backend, token: Any) -> int:
    """Id of a special token in the settings, a text or an object; 0 if there is none, as in an unset field."""
    name = token.get("content") if isinstance(token, dict) else token
    return (backend.generator.tokenizer.id_of(name) or 0) if isinstance(name, str) else 0


def now() -> str:
    """The present time in ISO 8601."""
    return datetime.now(UTC).isoformat()


@dataclass
class Loads:
    """The loads of all targets as one, because a router sends requests to the gateway."""

    _since: float = 0.0
    _tokens: int = 0
    _rate: float = 0.0

    def fields(self, backend: Backend) -> dict[str, Any]:
        """Fields of SchedulerLoad in all facades."""
        generator, page_size = backend.generator, backend.facts.target.page_size
        orchestrator = generator.orchestrator
        up = [target for target in orchestrator.targets if target.up]
        loads = [target.load.report for target in up if target.load.report is not None]
        running = sum(load.running_sessions for load in loads)
        sessions = orchestrator.sessions.by_id.values()
        waiting = max(0, len(sessions) - running)
        pages = sum(load.total_pages for load in loads)
        used = pages - sum(load.free_pages for load in loads)
        limit = sum(target.info.max_running_sessions for target in up if target.info is not None)
        uncached = [session.prompt_length for session in sessions if not session.stats.steps]
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used * page_size,
            "max_total_num_tokens": pages * page_size,
            "token_usage": used / pages if pages else 0.0,
            "gen_throughput": self._throughput(generator.metrics.tally.tokens),
            "utilization": running / limit if limit else 0.0,
            "max_running_requests": limit,
            "num_waiting_uncached_tokens": sum(uncached) if waiting else 0,
        }

    def _throughput(self, tokens: int) -> float:
        """Tokens per second since the last call."""
        passed = time.monotonic() - self._since
        if passed > _MIN_INTERVAL:
            self._rate = (tokens - self._tokens) / passed if self._since else 0.0
            self._since, self._tokens = time.monotonic(), tokens
        return self._rate
