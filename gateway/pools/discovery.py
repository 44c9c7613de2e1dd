"""DNS names and files of addresses, looked at again and again while the gateway runs.

A look that fails changes nothing: the replicas that were found last stay members, and those that are gone are only
unreachable. An address that a look no longer finds leaves its pool.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gateway.pools.addresses import Kind, Named, check_address
from gateway.pools.members import Members, Service
from outrider.errors import ConfigError
from outrider.process.ports import host_and_port

log = logging.getLogger(__name__)

_SETTLE = 0.1  # seconds for which a changed file must stay the same, because it may be written in parts
_MIN_INTERVAL = 1.0  # seconds between two looks, also where losses ask for one

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


# Of their own, because a resolver that does not answer holds a thread for half a minute.
_resolvers = ThreadPoolExecutor(2, thread_name_prefix="resolver")


async def lookup(host: str, port: int) -> Sequence[str]:
    """All addresses of a DNS name: those of IPv4 if it has any, because others are of the same replicas.

    Raises OSError.
    """
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers, resolve)
    families = {family for family, *_ in found}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return [host_and_port(str(address[0]), port) for own, *_, address in found if own == family]


class Discovery:
    """Looks at the DNS names and files among the flags. Lives in one event loop.

    members: those of both pools. failures: why the last look failed, by service and name
    """

    def __init__(self, members: Members, interval: float, lookup: Lookup = lookup) -> None:
        """interval: seconds between two looks. Raises ConfigError."""
        if not interval > 0:
            raise ConfigError(f"--discovery-interval must be more than 0, not {interval:g}")
        self.members = members
        self._interval = interval
        self._lookup = lookup
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: dict[Service, list[asyncio.Event]] = {service: [] for service in Service}
        self._texts: dict[tuple[Service, Named], str] = {}  # of files, at the last look
        self.failures: dict[tuple[Service, str], str] = {}

    def start(self) -> None:
        """Begin to look at the names that may stand for many replicas."""
        for service in Service:
            for named in self.members.names(service):
                if named.kind is not Kind.ADDRESS:
                    wake = asyncio.Event()
                    self._wakes[service].append(wake)
                    watch = self._watch(service, named, wake)
                    self._tasks.append(asyncio.create_task(watch, name=f"{service} {named.text}"))

    def look_now(self, service: Service) -> None:
        """Look at once, because a replica was lost."""
        for wake in self._wakes[service]:
            wake.set()

    async def stop(self) -> None:
        """End all looks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, service: Service, named: Named, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            try:
                await self._look(service, named)
            except Exception:  # a bug must not end discovery
                log.exception("%s: the %ss that it names could not be changed", named.text, service)
            await asyncio.sleep(min(_MIN_INTERVAL, self._interval))
            try:
                async with asyncio.timeout(max(0.0, self._interval - _MIN_INTERVAL)):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _look(self, service: Service, named: Named) -> None:
        key = service, named.text
        try:
            found = await (self._of_name(named) if named.kind is Kind.DNS else self._of_file(service, named))
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "it is not text") or str(error)
            if self.failures.get(key) != reason:
                log.warning("%s: %s; the %ss that it named stay as they are", named.text, reason, service)
            self.failures[key] = reason
            return
        self.failures.pop(key, None)
        if found is not None:
            self.members.set_addresses(service, named, found)

    async def _of_name(self, named: Named) -> Sequence[str]:
        return await self._lookup(named.host, named.port)

    async def _of_file(self, service: Service, named: Named) -> Sequence[str] | None:
        """The addresses in a file; None if it has not changed."""
        text = await asyncio.to_thread(named.path.read_text, encoding="utf-8")
        while self._texts.get((service, named)) != text:
            await asyncio.sleep(_SETTLE)
            again = await asyncio.to_thread(named.path.read_text, encoding="utf-8")
            if again == text:
                self._texts[service, named] = text
                return addresses_in(text, str(named.path))
            text = again
        return None


def addresses_in(text: str, path: str) -> list[str]:
    """The addresses in a file, one a line, with comments behind #. Lines that are no address are logged and skipped."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            try:
                found.append(check_address(content))
            except ConfigError as error:
                log.warning("line %d of %s is skipped: %s", number, path, error.message)
    return list(dict.fromkeys(found))
