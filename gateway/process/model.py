"""One model of a gateway process, from its pools to what serves its requests.

1. its pools are filled by flags, DNS, files and the API
2. its first target decides what all must serve, and has its tokenizer
3. its drafts connect, and its other replicas as they come
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.admission.admission import Admission
from gateway.control.control import Control
from gateway.control.health import Health
from gateway.control.models import ServedModel, Serving
from gateway.control.replicas import Replicas
from gateway.control.server_info import Facts
from gateway.control.worker_answers import answers_for
from gateway.orchestration import self_test
from gateway.orchestration.generator import Generator
from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.sampling_defaults import FILE, OPENAI, SamplingDefaults, of_model
from gateway.pools.addresses import parse
from gateway.pools.discovery import Discovery
from gateway.pools.members import Members
from gateway.pools.pool import Routing
from gateway.process.links import Links
from gateway.process.waiting import any_draft, connect_draft, connect_target, first_target, join
from gateway.streams.connection import Connection
from gateway.streams.target import TargetLink
from gateway.telemetry.compatible_metrics import SglangMetrics, VllmMetrics
from gateway.telemetry.metrics import Metrics
from gateway.text.early import EarlyTokenizer
from gateway.text.tokenizer import ModelTokenizer
from gateway.workers.peers import Peers
from outrider.checkpoints.checkpoint import display_name
from outrider.config import GatewayConfig
from outrider.errors import OutriderError
from outrider.process.startup import STARTUP

log = logging.getLogger(__name__)

_RETRY = 15.0  # seconds between attempts to serve a model of several whose files cannot be read


class ModelRunner:
    """Runs one model. Use: `open`, `start`, `begin`, `follow`, `stop`. Lives in one event loop.

    config: of the model. served: the model, for routes. links: its replicas
    """

    def __init__(
        self, config: GatewayConfig, peers: Peers, admission: Admission, report: Callable[[], None], *, alone: bool
    ) -> None:
        """config: of this model. peers: the other workers of the gateway. report: called when a replica has changed.

        alone: it is the only model of the gateway, which ends with an error of this model at its start
        """
        scope = config.served_model_name[0] if config.models is not None else ""
        self.config, self._alone, self._scope = config, alone, scope
        self._admission = admission
        self._peers = peers.of_model(scope)
        metrics = Metrics()
        routing = Routing(config.cache_threshold, config.balance_abs_threshold, config.balance_rel_threshold)
        self._orchestrator = Orchestrator([], [], metrics, routing=routing, turns=admission.turns, model=scope)
        members = Members(map(parse, config.target), map(parse, config.draft), scope)
        self._members = members
        discovery = Discovery(members, config.discovery_interval)
        connection = Connection(config.service_tls(), config.stream_transport, config.service_token())
        path = display_name(config.model_path) if config.model_path is not None else ""
        self.links = Links(discovery, self._orchestrator, connection, report=report, strict=alone, model_path=path)
        self._replicas = Replicas(discovery, self._orchestrator, self._peers, scope)
        health = Health(self._orchestrator, admission, config.draft_reports())
        self.served = ServedModel(config.served_model_name, metrics, self._replicas, health)
        self._background: list[asyncio.Task[Any]] = []
        self._early = EarlyTokenizer()
        self._first: TargetLink | None = None

    @property
    def name(self) -> str:
        """Its own name; empty for the only model of a gateway that was given none."""
        return next(iter(self.config.served_model_name), "")

    @property
    def open_sessions(self) -> int:
        """Sessions of the model that run or wait."""
        return len(self._orchestrator.sessions.by_id)

    def take_decisions(self, before: ModelRunner) -> None:
        """Take what the API has decided about the replicas of a runner that this one replaces. Called before `open`."""
        for decision in before._members.decisions:
            self._members.take(decision)

    def set_next(self, after: ModelRunner | None) -> None:
        """Another runner is to replace this one; None: none is. Its pools take what the API decides, and show it."""
        self._members.next = after._members if after is not None else None
        self._replicas.next = after._replicas if after is not None else None

    def replace(self, before: ModelRunner) -> None:
        """This runner serves the model from now on. The sessions of the one before run on there, in these pools."""
        former, own = before.served.running, self.served.running
        assert former is not None, "a runner without sessions only ends"
        former.control.retire(own.control if own is not None else None)
        if own is not None:
            own.generator.take_over(former.generator)
        before.links.on_late = partial(join, None)
        self._replicas.replace(before._replicas)

    def release(self, before: ModelRunner) -> None:
        """No session of a runner that this one may have replaced is left."""
        self._replicas.release(before._replicas)

    async def open(self) -> None:
        """Let the other workers ask for the pools, and take what was decided there."""
        await self._peers.serve(self._replicas.answers)
        await self._replicas.catch_up()

    def start(self) -> None:
        """Connect to targets."""
        self.links.on_early_files = self._early.begin
        self.links.start()
        self._background.append(asyncio.create_task(self._replicas.keep_up(), name="keep up"))

    # --- until it is served ---

    async def begin(self) -> None:
        """Wait for the first target; from then on the model is served. Raises ConfigError, Unavailable.

        Of several models none ends the gateway: the reason is logged, and the model waits without end.
        """
        config = self.config
        # Where replicas may be found later, the gateway waits for the first one without end.
        seconds = config.connect_timeout if self._alone and self.links.targets_are_fixed else None
        while True:
            target = self._first = await first_target(self._orchestrator.targets, self.links, seconds)
            if self._alone:
                STARTUP.done("waiting for the target")
            try:
                tokenizer, defaults = await self._early.of(target.tokenizer.files), _defaults(config, target)
            except OutriderError as error:
                if self._alone:
                    raise
                await self._wait_for_other_files(target, error.message)
            else:
                break
        self.links.expect(target)
        await self._serve(target, tokenizer, defaults)

    async def _wait_for_other_files(self, target: TargetLink, reason: str) -> None:
        """The files of the first target cannot be used: look at them again later."""
        if self.served.failure != reason:
            log.error("the model %s cannot be served: %s", self.served.name, reason)
        self.served.failure = reason
        target.tokenizer.files = {}
        target.reconnect()
        await asyncio.sleep(_RETRY)

    async def _serve(self, target: TargetLink, tokenizer: ModelTokenizer, defaults: SamplingDefaults) -> None:
        config, served, info = self.config, self.served, target.info
        assert info is not None, "a link that is up has info"
        names = config.served_model_name or (info.model.model_path,)
        facts = Facts(config, info, self._peers, target.tokenizer.files)
        generator = Generator(
            self._orchestrator,
            tokenizer,
            served.metrics,
            name=names[0],
            aliases=names[1:],
            vocab_size=info.model.vocab_size,
            max_session_tokens=info.max_session_tokens,
            admission=self._admission,
            timeout=config.request_timeout,
            defaults=defaults,
        )
        if not config.disable_vllm_metrics:
            served.metrics.registry.register(VllmMetrics(served.metrics, names[0]))
        if not config.disable_sglang_metrics:
            served.metrics.registry.register(SglangMetrics(served.metrics, names[0]))
        control = Control(self._orchestrator, facts)
        self.links.serve(control)
        tester = None if config.disable_draft_self_test else self_test.Tester(generator)
        if tester is not None:
            tests = [tester.test(draft) for draft in self._orchestrator.drafts]
            self._background += [asyncio.create_task(test, name="self-test") for test in tests]
        self.links.on_late = partial(join, tester)
        await self._peers.serve(answers_for(generator, control))
        served.names, served.failure = names, ""
        served.running = Serving(generator, facts, control)

    # --- while it is served ---

    async def follow(self) -> None:
        """Connect to the other services, forever.

        Raises ConfigError for a target that a flag names and that does not fit; with --require-draft also for a draft,
        and Unavailable for one that does not come.
        """
        orchestrator, links, config = self._orchestrator, self.links, self.config
        links.start_drafts()
        required = config.connect_timeout if config.require_draft else None
        others = [target for target in orchestrator.targets if target is not self._first]
        if self._alone:
            work = [connect_target(target) for target in others if links.is_named(target)]
        else:
            work = [join(None, target) for target in others]
        work += [connect_draft(one, required if links.is_named(one) else None) for one in orchestrator.drafts]
        if required is not None and config.draft and not any(map(links.is_named, orchestrator.drafts)):
            work.append(any_draft(orchestrator, required))
        await asyncio.gather(*work)

    def withdraw(self) -> None:
        """The other workers' requests are for no model of this name any more."""
        if self._scope:
            self._peers.withdraw()

    async def stop(self) -> None:
        """End its sessions and streams."""
        for task in self._background:
            task.cancel()
        await self.links.stop()
        await self._orchestrator.stop()


def _defaults(config: GatewayConfig, target: TargetLink) -> SamplingDefaults:
    """Sampling parameters for requests that omit them. Raises ConfigError."""
    if config.sampling_defaults == "openai":
        return OPENAI
    defaults = of_model(target.tokenizer.files)
    if defaults != OPENAI:
        log.info("default sampling parameters from the model's %s: %s", FILE, defaults)
    return defaults
