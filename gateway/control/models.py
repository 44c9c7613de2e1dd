"""The models behind one gateway: each request chooses one by name, and each control call names the one that it is for.

A model is there from the start, with its pools; it can be asked once its first target has been up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from gateway.admission.retry_after import time_away
from gateway.control.control import Control
from gateway.control.health import DEGRADED, OK, UNAVAILABLE, Health
from gateway.control.replicas import Replicas
from gateway.control.server_info import Facts
from gateway.orchestration.generator import Generator
from gateway.telemetry.exposition import labelled
from gateway.telemetry.metrics import Metrics, unread_answers
from gateway.workers.peers import Answers, Peers
from outrider.errors import InvalidRequest, ModelNotFound, NotFound, Unavailable


@dataclass(frozen=True, eq=False)
class Serving:
    """What serves a model once a target has been up."""

    generator: Generator
    facts: Facts
    control: Control


class ServedModel:
    """One model: its names and pools; its generator once a target has been up.

    names: in requests; the first one is its own. Without names in flags they are known with the first target
    failure: why it cannot be served although a target is up
    """

    def __init__(self, names: Sequence[str], metrics: Metrics, replicas: Replicas, health: Health) -> None:
        self.names = tuple(names)
        self.metrics = metrics
        self.replicas = replicas
        self.health = health
        self.failure = ""
        self.running: Serving | None = None
        self._since = time.monotonic()

    @property
    def name(self) -> str:
        """Its own name; empty as long as it is unknown."""
        return self.names[0] if self.names else ""

    @property
    def ready(self) -> bool:
        """True if requests for it can be served."""
        return self.running is not None and self.health.ready

    @property
    def serving(self) -> Serving:
        """What serves it. Raises Unavailable until a target has been up."""
        if self.running is not None:
            return self.running
        if self.failure:
            reason = f"the model `{self.name}` cannot be served: {self.failure}"
        elif (refused := self.health.orchestrator.sessions.absence.all_refused()) is not None:
            reason = refused.message
        elif self.health.orchestrator.targets:
            reason = f"the gateway waits for a target of the model `{self.name}`; retry later"
        else:
            reason = (
                f"the model `{self.name}` has no target: its pool is empty; add one with POST /workers, or retry later"
            )
        raise Unavailable(reason, retry_after=time_away(self._since))

    def state(self) -> dict[str, Any]:
        """As of Health, with the reason why it is not served yet."""
        body = self.health.state()
        if self.running is None:
            body["status"] = UNAVAILABLE
            if self.failure:
                body["missing"] = [self.failure, *body.get("missing", ())]
        return body


class Models:
    """All models of a gateway, in the order in which they were named. Requests without a name go to the first one.

    peers: the other workers
    """

    def __init__(self, models: Sequence[ServedModel], peers: Peers, *, any_model: bool = False) -> None:
        """any_model: the first one also serves requests that name a model that is not served."""
        self._models = list(models)
        self._any_model = any_model
        self._connections = CollectorRegistry()
        self._unread = unread_answers(self._connections)
        self.peers = peers

    def set(self, models: Iterable[ServedModel]) -> None:
        """Serve these models from now on."""
        self._models = list(models)

    @property
    def several(self) -> bool:
        """True if routes show the models, and ask for one."""
        return len(self._models) > 1

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[0]

    @property
    def names(self) -> list[str]:
        """All names of all models."""
        return [name for model in self._models for name in model.names]

    # --- choice ---

    def choose(self, name: str | None) -> Serving:
        """What serves a request for a model. name: one of its names; for none and "default" the first model.

        Raises ModelNotFound, Unavailable.
        """
        return self.find(name).serving

    def find(self, name: str | None) -> ServedModel:
        """The model of a request, up or not. Raises ModelNotFound."""
        if name is None or name in ("", "default"):
            return self.default
        found = next((model for model in self._models if name in model.names), None)
        if found is None and self._any_model:
            return self.default
        if found is None:
            raise self.not_found(name)
        return found

    def named(self, name: str | None, field: str = "model") -> ServedModel:
        """The model that a control call is for, up or not. field: of the query or the body, for errors.

        Raises InvalidRequest if it names none of several, ModelNotFound.
        """
        if name:
            found = next((model for model in self._models if name in model.names), None)
            if found is None and name != "default":
                raise self.not_found(name)
            return found or self.default
        if self.several:
            where = f"in the query, such as ?model={self.default.name}" if field == "model" else f"in `{field}`"
            raise InvalidRequest(
                f"this gateway serves {len(self._models)} models; name the one that this is for {where}; GET "
                "/v1/models lists them",
                param=field,
            )
        return self.default

    def controlled(self, name: str | None) -> Serving:
        """What serves the model that a control call is for. Raises as `named`, and Unavailable."""
        return self.named(name).serving

    def chosen(self, name: str | None) -> list[ServedModel]:
        """The model of this name; all without a name. Raises ModelNotFound."""
        return [self.named(name)] if name else self._models

    def not_found(self, name: str) -> ModelNotFound:
        """The error for a name that is not served."""
        served = " or ".join(f"`{one}`" for one in self.names)
        return ModelNotFound(
            f"the model `{name}` is not served here; ask for {served}, or start the gateway with --accept-any-model",
            param="model",
        )

    # --- replicas ---

    async def replicas(self, model: str | None = None) -> list[tuple[ServedModel, dict[str, Any]]]:
        """The replicas of one model, or of all, each with its model. Raises ModelNotFound."""
        return [(one, replica) for one in self.chosen(model) for replica in await one.replicas.listed()]

    async def replica(self, name: str, model: str | None = None) -> tuple[ServedModel, dict[str, Any]]:
        """The replica with an id or an address, and its model. model: whose pools are meant.

        Raises NotFound, ModelNotFound, and InvalidRequest for an address in the pools of several models.
        """
        found, missing = [], NotFound(f"no replica {name!r} is in a pool")
        for one in self.chosen(model):
            try:
                found.append((one, await one.replicas.find(name)))
            except NotFound as error:
                missing = error
        if not found:
            raise missing
        if len(found) > 1:
            models = ", ".join(one.name for one, _ in found)
            raise InvalidRequest(
                f"{name} is in the pools of several models ({models}); name one with ?model=", param="model"
            )
        return found[0]

    # --- health and metrics ---

    @property
    def ready(self) -> bool:
        """True if requests for any model can be served."""
        return any(model.ready for model in self._models)

    def state(self) -> dict[str, Any]:
        """The state of all models as one: unavailable if none can be served, degraded if one of them is not ok."""
        if not self.several:
            return self.default.state()
        states = {model.name: model.state() for model in self._models}
        found = {state["status"] for state in states.values()}
        body: dict[str, Any] = {"status": UNAVAILABLE if not self.ready else OK if found == {OK} else DEGRADED}
        missing = [f"{name}: {text}" for name, state in states.items() for text in state.get("missing", ())]
        return body | ({"missing": missing} if missing else {}) | {"models": states}

    def count_unread(self) -> None:
        """Count an answer that was cut on its connection, which is of no model."""
        (self._unread if self.several else self.default.metrics.unread_answers).inc()

    def metrics(self) -> str:
        """The page of metrics of this worker. With several models, the samples of each have the label `model`."""
        if not self.several:
            return self.default.metrics.render().decode()
        pages = {model.name: model.metrics.render().decode() for model in self._models}
        return labelled("model", pages | {"": generate_latest(self._connections).decode()})

    @property
    def answers(self) -> Answers:
        """Handlers of the other workers' requests that are for no model."""
        asked: dict[str, Callable[[Any], Any]] = {"metrics": lambda _: self.metrics()}
        return asked
