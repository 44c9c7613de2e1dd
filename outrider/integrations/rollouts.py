"""A trainer's side of the gateway's HTTP routes: rollouts, weights, pauses.

It needs aiohttp, and safetensors for weights, which trainers have; Outrider's other dependencies may be absent.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp

_WAIT_SECONDS = 1.0  # before a request is repeated, where the gateway names no time
_RETRIED = (429, 503)
_UPDATE_SECONDS = 3600.0


class RolloutError(RuntimeError):
    """A call that the gateway refused, with its reason."""


class RolloutGateway:
    """A gateway. One event loop uses it, as an asynchronous context."""

    def __init__(self, url: str, key: str = "", patience: float = 300.0) -> None:
        """key: of an administrator; empty where the gateway needs none from here (--admin-networks).

        patience: seconds for which rollouts are repeated while the gateway is full, restarts or has no target
        """
        self.url = url if "://" in url else f"http://{url}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutGateway:
        self._session = aiohttp.ClientSession(
            self.url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),  # the gateway bounds and queues them
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, route: str) -> Any:
        """The answer to a GET. Raises RolloutError."""
        return await self._call("GET", route, None)

    async def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a POST. Raises RolloutError."""
        return await self._call("POST", route, body or {})

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of /generate. Raises RolloutError for a wrong request at once, else after the patience."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                found: dict[str, Any] = await self._call("POST", "/generate", body)
            except _Later as error:
                if time.monotonic() > deadline:
                    raise RolloutError(f"no answer for {self._patience:.0f} s: {error}") from error
                await asyncio.sleep(error.seconds)
            else:
                return found

    async def update_weights(
        self, tensors: AsyncIterator[tuple[str, Any]], version: str | None, bucket_bytes: int
    ) -> int:
        """Replace weights by a trainer's tensors. Returns their number. Raises RolloutError for those that do not fit.

        They are sent in calls of up to `bucket_bytes`, each of which takes effect as a whole. With more than one,
        generation is paused meanwhile, and stays so if a later one fails, or any gets no answer, because the targets
        may then have a part of the new weights: a whole update ends that.
        """
        held: dict[str, Any] = {}
        size = sent = 0
        before = await self._fingerprint()
        async for name, tensor in tensors:
            added = tensor.numel() * tensor.element_size()
            if held and size + added > bucket_bytes:
                if not sent:
                    await self.post("/pause_generation", {"mode": "retract"})
                await self._send(held, version and f"{version} (incomplete)", sent, before, paused=True)
                sent += len(held)
                held, size = {}, 0
            held[name] = tensor.detach().to("cpu", copy=True).contiguous()  # a trainer may reuse its buffer
            size += added
        if not held:
            raise RolloutError("the trainer sent no weights")
        await self._send(held, version, sent, before, paused=sent > 0)
        if sent:
            await self.post("/continue_generation")
        return sent + len(held)

    async def _fingerprint(self) -> str:
        """Of the weights that are served; empty without an answer."""
        try:
            return str((await self.get("/get_model_info")).get("fingerprint", ""))
        except RolloutError:
            return ""

    async def _send(
        self, tensors: dict[str, Any], version: str | None, sent: int, before: str, *, paused: bool
    ) -> None:
        """sent: number of the update's tensors that the targets have already. before: fingerprint of the weights that
        it replaces. paused: by this update.
        """
        from safetensors.torch import save

        content = await asyncio.to_thread(save, tensors)
        params = {} if version is None else {"weight_version": version}
        try:
            await self._call("POST", "/update_weights_from_tensor", content, params)
        except _NoAnswer as error:
            raise RolloutError(
                f"{error}; the targets may have these tensors or not"
                + (", so generation stays paused until a whole update succeeds" if paused else "; update them again")
            ) from error
        except RolloutError as error:
            if sent:
                raise RolloutError(
                    f"{error}; the first {sent} tensors of this update are in place already, so generation stays "
                    "paused until a whole update succeeds"
                ) from error
            if not before or await self._fingerprint() != before:  # some targets have taken them, others have not
                rest = ", so generation stays paused until a whole update succeeds" if paused else "; update them again"
                raise RolloutError(f"{error}; the weights are not the former ones any more{rest}") from error
            if paused:
                await self.post("/continue_generation")
            raise RolloutError(f"{error}; the weights are unchanged") from error

    async def _call(
        self, method: str, route: str, body: Mapping[str, Any] | bytes | None, params: Mapping[str, str] | None = None
    ) -> Any:
        """body: JSON, or a safetensors file. Raises _Later if a repetition may succeed, and RolloutError."""
        assert self._session is not None, "used as a context"
        sent: dict[str, Any] = {"json": body} if isinstance(body, Mapping) else {}
        if isinstance(body, bytes):
            sent = {
                "data": io.BytesIO(body),
                "headers": {"Content-Type": "application/octet-stream"},
                "timeout": aiohttp.ClientTimeout(total=_UPDATE_SECONDS),
            }
        try:
            async with self._session.request(method, route, params=params, **sent) as response:
                if response.status < 400:
                    return await response.json()
                reason = f"{self.url}{route}: {response.status}: {_message(await response.text())}"
                if response.status in _RETRIED:
                    raise _Later(reason, response.headers.get("Retry-After"))
                raise RolloutError(reason)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _NoAnswer(f"{self.url}{route}: {str(error) or type(error).__name__}") from error


class _Later(RolloutError):
    """A refusal that may end. seconds: before the next attempt."""

    def __init__(self, reason: str, wait: str | None = None) -> None:
        super().__init__(reason)
        self.seconds = float(wait) if wait and wait.isdigit() else _WAIT_SECONDS


class _NoAnswer(_Later):
    """No answer came, so that what the gateway has done is unknown."""


def _message(text: str) -> str:
    """The message in an error's body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
