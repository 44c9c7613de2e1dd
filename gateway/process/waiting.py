"""Waits for replicas: for the first target of a model, and for the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

from gateway.orchestration import self_test
from gateway.orchestration.orchestrator import Orchestrator
from gateway.process.links import AnyLink, Links
from gateway.streams.availability import ReplicaState
from gateway.streams.draft import DraftLink
from gateway.streams.pool_weights import OtherWeights
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

WARN_AFTER = 2.0  # seconds after which an absent service is logged
_POLL_SECONDS = 0.2
_START_UP = 60.0  # seconds in which a service that does not fit ends the process; later it is only unused


async def first_target(targets: Sequence[TargetLink], links: Links, seconds: float | None) -> TargetLink:
    """Wait for the first target. Raises ConfigError if one that a flag names does not fit, Unavailable after `seconds`.

    targets: those of the pool, which others may join meanwhile. If some targets have updated weights that restarted
    ones lack, a target with updated weights is returned, if it is up by then.
    """
    with _timeout_of(targets, seconds):
        async with asyncio.timeout(seconds):
            while (first := _first_up(targets, links)) is None:
                await _change(links)
    if not _updated(first):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WARN_AFTER):
                while not all(link.absence.settled.is_set() for link in targets):
                    await _change(links)
                    first = _first_up(targets, links) or first
    return first


@contextlib.contextmanager
def _timeout_of(targets: Sequence[TargetLink], seconds: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        reasons = "; ".join(f"the target at {link.address}: {link.availability.reason}" for link in targets)
        raise Unavailable(f"no target service answered in {seconds:.0f} s ({reasons})") from None


async def _change(links: Links) -> None:
    links.changed.clear()
    await links.changed.wait()


def _first_up(targets: Sequence[TargetLink], links: Links) -> TargetLink | None:
    """As _most_recent. Raises the ConfigError of a target that a flag names."""
    for link in targets:
        if link.absence.refusal is not None and links.is_named(link):
            raise link.absence.refusal
    return _most_recent(targets)


def _most_recent(targets: Sequence[TargetLink]) -> TargetLink | None:
    """The first target that is up with updated weights; else the first that is up."""
    up = [link for link in targets if link.up and link.info is not None]
    return next((link for link in up if _updated(link)), next(iter(up), None))


def _updated(link: TargetLink) -> bool:
    """True if a target's weights were updated since its start."""
    info = link.info
    return info is not None and info.first_fingerprint not in ("", info.model.fingerprint)


async def connect_target(link: TargetLink) -> None:
    with contextlib.suppress(OtherWeights):  # logged by the link; the next update resolves it
        try:
            await link.wait_up(WARN_AFTER)
        except Unavailable as error:
            log.warning("%s; continuing without it until it is up", error.message)
            with contextlib.suppress(Unavailable):
                await link.wait_up(_START_UP)


async def any_draft(orchestrator: Orchestrator, seconds: float) -> None:
    """Wait until one of the drafts is up that DNS or files name. Raises Unavailable after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not any(draft.up for draft in orchestrator.drafts):
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable(f"no draft service answered in {seconds:.0f} s (--require-draft)")
        await asyncio.sleep(_POLL_SECONDS)


async def join(tester: self_test.Tester | None, link: AnyLink) -> None:
    """Watch a replica that joins while the gateway serves; test a draft. It is never an error."""
    if isinstance(link, DraftLink):
        await connect_draft(link, None)
        if tester is not None:
            await tester.test(link)
        return
    with contextlib.suppress(ConfigError):  # logged by the link
        await connect_target(link)


async def connect_draft(link: DraftLink, required: float | None) -> None:
    """Wait for a draft. required: seconds within which it must come, or the process ends; None without it."""
    if required is not None:
        await link.wait_up(required)
        return
    # Loading and compiling a draft's model takes up to a minute, so that an absent one is no warning before.
    for seconds, silent in ((WARN_AFTER, logging.INFO), (_START_UP - WARN_AFTER, logging.WARNING)):
        try:
            await link.wait_up(seconds)
            return
        except (Unavailable, ConfigError):  # the link goes on trying
            state, reason = link.availability.state, link.availability.reason
        what = f"the {link.service} at {link.address}"
        if state not in (ReplicaState.UNREACHABLE, ReplicaState.STARTING):  # the link has logged the reason
            log.warning("%s is not used; text is decoded plainly until it is", what)
            return
        level = logging.INFO if state is ReplicaState.STARTING else silent
        log.log(level, "%s is not up yet (%s); text is decoded plainly until it is", what, reason)
