"""The models that a gateway runs, and the file of --models, which is read again at SIGHUP.

A new model joins. One that is gone gets no new requests, and ends with its last session. One whose table has changed is
replaced: it serves as it was until a target of the new table is up, if that names any, and its sessions run on in the
pools of the new table. A mistake in the file changes nothing. All of this also holds before a first model is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.control.models import Models
from gateway.process.model import ModelRunner
from gateway.process.models_file import model_configs
from outrider.config import GatewayConfig
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

# Seconds for which a model that leaves runs on in any case, for requests that have chosen it and open their session.
_LEAST_SECONDS = 2.0
_POLL_SECONDS = 0.1


class ModelsReload:
    """Lives in one event loop. changed: set after the file was read again, or another model is served."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        runners: Sequence[ModelRunner],
        make: Callable[[GatewayConfig], ModelRunner],
        on_change: Callable[[], None],
    ) -> None:
        """config: of the gateway. models: for its routes. runners: of the models at its start, started by the caller.

        make: a runner of one more model. on_change: called after the first model has changed, or is served
        """
        self._config = config
        self._models = models
        self._runners = list(runners)  # of `models`, in the same order
        self._coming: dict[str, ModelRunner] = {}  # by name, those that will replace another one
        self._make = make
        self._on_change = on_change
        self._starts: dict[ModelRunner, asyncio.Task[None]] = {}
        self._first: list[tuple[ModelRunner, asyncio.Task[None]]] = []
        self._leaving: dict[ModelRunner, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    def started(self, runner: ModelRunner, start: asyncio.Task[None]) -> None:
        """A model of the gateway's start waits for its first target in a task, which ends if the model leaves."""
        self._starts[runner] = start
        self._first.append((runner, start))

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """Of the models that requests may name, in their order."""
        return self._runners

    @property
    def first_starts(self) -> Sequence[tuple[ModelRunner, asyncio.Task[None]]]:
        """The models of the gateway's start that have not left, with their waits for a first target."""
        return [(runner, start) for runner, start in self._first if runner in self._runners]

    @property
    def serves_any(self) -> bool:
        """True if a target of any model has been up."""
        return any(runner.served.running is not None for runner in self._runners)

    @property
    def several(self) -> bool:
        """False if the only model is the one of the start, whose own wait ends the gateway."""
        return len(self._runners) > 1 or not self.first_starts

    def begin(self, hangup: asyncio.Event) -> None:
        """Follow an event until `stop`."""
        self._following = asyncio.create_task(self.follow(hangup), name="models read again")

    async def follow(self, hangup: asyncio.Event) -> None:
        """Read the file each time that the event is set, until cancelled."""
        while True:
            await hangup.wait()
            hangup.clear()
            try:
                self._apply(model_configs(self._config))
            except ConfigError as error:
                log.error("%s; the models stay as they were", error.message)
            except Exception:  # a bug must not end the models that run
                log.exception("the models of %s could not be changed", self._config.models)

    def _apply(self, configs: Sequence[GatewayConfig]) -> None:
        """Run these models. Raises ConfigError before anything has changed."""
        known = {runner.name: runner for runner in self._runners}
        found = [known.get(one.served_model_name[0]) for one in configs]
        coming = [self._coming.get(one.served_model_name[0]) for one in configs]
        runners = [
            next((made for made in of_name if made is not None and made.config == one), None) or self._make(one)
            for one, of_name in zip(configs, zip(found, coming, strict=True), strict=True)
        ]
        former, self._coming = self._coming, {}
        for runner in former.values():
            if runner not in runners:
                self._leave(runner)
        for runner in known.values():
            runner.set_next(None)
        self._runners = []
        for runner, before in zip(runners, found, strict=True):
            starts = before is not runner and runner not in former.values()
            if before is None or before is runner or (starts and not (before.served.ready and runner.config.target)):
                self._runners.append(runner)
            else:
                self._runners.append(before)
                self._coming[runner.name] = runner
                before.set_next(runner)
            if starts:
                if before is not None:
                    runner.take_decisions(before)
                self._starts[runner] = asyncio.create_task(self._start(runner), name=f"start of {runner.name}")
        gone = [runner for runner in known.values() if runner not in self._runners]
        changed = [one.name for one, before in zip(runners, found, strict=True) if before not in (None, one)]
        log.info(
            "%s was read again: it has %s; changed: %s; gone: %s", self._config.models,
            ", ".join(runner.name for runner in runners), ", ".join(changed) or "none",
            ", ".join(runner.name for runner in gone if runner.name not in changed) or "none",
        )  # fmt: skip
        self._publish()
        for runner in gone:
            self._leave(runner)

    def _publish(self) -> None:
        self._models.set(runner.served for runner in self._runners)
        self._on_change()
        self.changed.set()

    async def _start(self, runner: ModelRunner) -> None:
        try:
            if self._coming.get(runner.name) is not runner:  # else the present one answers the other workers
                await runner.open()
            runner.start()
            await runner.begin()
            if replaces := self._coming.get(runner.name) is runner:
                del self._coming[runner.name]
                index = next(i for i, one in enumerate(self._runners) if one.name == runner.name)
                before, self._runners[index] = self._runners[index], runner
                self._leave(before)
            self._publish()
            if replaces:
                await runner.open()
            await runner.follow()
        except Exception:  # the other models go on
            log.exception("the model %s cannot be run", runner.name)

    # --- models that leave ---

    def _leave(self, runner: ModelRunner) -> None:
        if (start := self._starts.pop(runner, None)) is not None:
            start.cancel()
        after = next((one for one in self._runners if one.name == runner.name), None)
        if after is None:
            runner.withdraw()
        elif runner.served.running is not None:
            after.replace(runner)
        self._leaving[runner] = asyncio.create_task(self._end(runner), name=f"end of {runner.name}")

    async def _end(self, runner: ModelRunner) -> None:
        await asyncio.sleep(_LEAST_SECONDS)
        while runner.open_sessions:  # noqa: ASYNC110 - sessions end in many ways, and models rarely leave
            await asyncio.sleep(_POLL_SECONDS)
        for one in (*self._runners, *self._leaving):
            one.release(runner)
        await runner.stop()
        del self._leaving[runner]
        log.info("the model %s as it was is gone; no session of it is left", runner.name)

    async def stop(self) -> None:
        """End all models."""
        tasks = [*self._starts.values(), *self._leaving.values()]
        tasks += [self._following] if self._following is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for runner in (*self._runners, *self._coming.values(), *self._leaving):
            await runner.stop()
