"""The stage of a training run in which the target generates answers: its process, the store, and repeated requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig, TrainConfig, to_argv
from outrider.errors import ConfigError, EngineFault, Unavailable
from outrider.process.ports import socket_folder
from outrider.process.python_command import python_command
from outrider.serving.features import FeatureSpec, row_bytes
from outrider.supervisor.processes import EXIT_MISCONFIGURED, Child
from outrider.telemetry import write_line
from outrider.text.tokenizer import Tokenizer
from services.draft.formats.target import read_target
from services.draft.learning.records.store import Store
from services.draft.train.data.collect import Collector, Limits, TargetClient
from services.draft.train.data.prompts import Conversation, PromptJob, jobs, read_conversations, read_openings
from services.draft.train.progress import Bar

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 1.0  # seconds
_ATTEMPTS = 5  # reconnections without a new answer before the run ends


def open_store(config: TrainConfig, target: Path, states: FeatureSpec) -> Store:
    """The answers of a training run. Raises ConfigError if the folder holds answers to other settings."""
    about = {
        "target": checkpoint.fingerprint(target), "layers": list(states.layers), "final": states.final,
        "temperature": list(config.temperature), "max_new_tokens": config.max_new_tokens,
        "max_length": config.max_length, "seed": config.seed, "held_out": config.held_out,
    }  # fmt: skip
    width = (len(states.layers) + states.final) * read_target(target).hidden_size
    folder = Path(config.answers or config.output.rstrip("/") + ".answers").expanduser()
    return Store(folder, about, row_bytes(width, states.format), enough=config.tokens)


async def write_answers(config: TrainConfig, store: Store, states: FeatureSpec, fingerprint: str) -> None:
    """Let the target generate until there are enough answers. Raises OutriderError if it cannot.

    fingerprint: of the target's weights
    """
    conversations = read_conversations(config.data, config.data_limit)
    openings = read_openings(config.free_openings)
    limits = Limits(
        config.max_new_tokens, config.max_length, config.max_running_requests, config.tokens, config.max_bytes
    )
    if store.token_count >= limits.tokens or store.bytes >= limits.bytes:
        log.info("%d answers of %d tokens are there already", len(store), store.token_count)
        return
    todo = Todo(
        lambda: jobs(conversations, config.free_prompts, config.temperature, config.seed, openings),
        conversations,
        config.free_prompts,
    )
    await _write(config, store, states, fingerprint, limits, todo)
    if store.token_count < limits.tokens and not all(one.rollout for one in conversations):
        log.warning(
            "%d tokens were generated, not the %d of --tokens: either greedy answers to further prompts would only "
            "repeat, or --max-bytes is reached", store.token_count, limits.tokens,
        )  # fmt: skip


async def write_jobs(
    config: TrainConfig, store: Store, states: FeatureSpec, fingerprint: str, wanted: Sequence[PromptJob]
) -> None:
    """Let the target generate the answers of these jobs. Raises OutriderError if it cannot. Others as of
    `write_answers`.
    """
    most = store.token_count + len(wanted) * config.max_new_tokens
    limits = Limits(config.max_new_tokens, config.max_length, config.max_running_requests, most, config.max_bytes)
    todo = Todo(lambda: iter(wanted), [job.conversation for job in wanted], 0)
    await _write(config, store, states, fingerprint, limits, todo)


class Todo(NamedTuple):
    """jobs: all of them, from the beginning; those whose answers are stored are passed over.

    conversations: of the jobs; free: as of `jobs`
    """

    jobs: Callable[[], Iterator[PromptJob]]
    conversations: Sequence[Conversation]
    free: int | None


async def _write(
    config: TrainConfig, store: Store, states: FeatureSpec, fingerprint: str, limits: Limits, todo: Todo
) -> None:
    """Start the target unless one is named, and repeat requests that it lost."""
    tls, token = config.service_tls(), config.service_token()
    async with _target(config) as (address, child):
        failures, known = 0, len(store)
        while True:
            if child is not None:
                await _wait_ready(child)
            try:
                async with TargetClient(address, states, tls, fingerprint, token=token) as client:
                    check_template(client.tokenizer, todo.conversations, todo.free)
                    collector = Collector(client, store, limits, config.held_out)
                    await _collect(collector, store, limits, todo.jobs())
                    break
            except Unavailable as error:
                failures = 0 if len(store) > known else failures + 1
                known = len(store)
                if failures >= _ATTEMPTS:
                    raise
                log.warning("%s; unfinished answers are requested again", error.message)
                await asyncio.sleep(1.0)


def check_template(tokenizer: Tokenizer, conversations: Sequence[Conversation], free: int | None) -> None:
    """Raise ConfigError if a model without a chat template is to answer chats. free: as of `jobs`."""
    if tokenizer.template.source is not None:
        return
    if not conversations or free:
        raise ConfigError(
            "the target has no chat template, so it cannot begin conversations itself; name files of texts with "
            '--data, one {"text": ...} a line, and leave out --free-prompts'
        )
    if chats := sum(conversation.chat for conversation in conversations):
        raise ConfigError(
            f"the target has no chat template, but {chats} of {len(conversations)} prompts of --data need one; "
            'write them as {"text": ...}'
        )


async def _collect(collector: Collector, store: Store, limits: Limits, todo: Iterator[PromptJob]) -> None:
    """Collect answers, and report progress."""
    writing = asyncio.create_task(collector.run(todo))
    start, began = store.token_count, time.monotonic()
    with Bar("answers, in tokens", limits.tokens, start) as bar:
        while not writing.done():
            await asyncio.wait([writing], timeout=_PROGRESS_INTERVAL)
            speed = (store.token_count - start) / (time.monotonic() - began)
            size = store.bytes / 2**30
            bar.at(store.token_count, f"{len(store)} answers, {speed:.0f} tokens/s, {size:.1f} GiB")
    if collector.left_out:
        level = logging.WARNING if collector.last_reason else logging.INFO
        log.log(level, "conversations that were left out: %s", collector.left_out_summary)
    writing.result()


@asynccontextmanager
async def _target(config: TrainConfig) -> AsyncIterator[tuple[str, Child | None]]:
    """Address of the target, and its process if this run started it."""
    if config.target is not None:
        yield config.target, None
        return
    with socket_folder("outrider-") as runtime:
        address = f"unix:{runtime}/target.sock"
        room = config.max_running_requests * (config.max_length + 64)
        flags = TargetConfig(
            model_path=config.model_path, listen=address, max_running_requests=config.max_running_requests,
            max_total_tokens=room, cores=config.cores, niceness=config.niceness, log_level=config.log_level,
            log_format=config.log_format,
        )  # fmt: skip
        child = Child("target", python_command("-um", "outrider", "target", *to_argv(flags)), address, write_line)
        life = asyncio.create_task(child.keep_alive())
        try:
            yield address, child
        finally:
            child.end()
            await life


async def _wait_ready(child: Child) -> None:
    """Wait until the target serves. Raises ConfigError or EngineFault if it does not start."""
    ready = asyncio.create_task(child.wait_ready())
    while not ready.done() and child.gave_up is None:
        await asyncio.wait([ready], timeout=_PROGRESS_INTERVAL)
    if not ready.done():
        ready.cancel()
        message = f"the target does not start: {child.reason}"
        raise ConfigError(message) if child.gave_up == EXIT_MISCONFIGURED else EngineFault(message)
