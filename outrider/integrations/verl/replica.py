"""A replica of verl: one gateway, which runs already, or which the replica starts on the devices of its workers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.device import get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutReplica

from outrider.integrations.verl.names import server_name
from outrider.integrations.verl.options import Options, ReplicaFacts, all_devices
from outrider.integrations.verl.server import OutriderServer

log = logging.getLogger(__name__)


class OutriderReplica(RolloutReplica):  # type: ignore[misc]  # verl is not installed where this is checked
    """Starts the Ray actor that asks the gateway for rollouts."""

    async def launch_servers(self) -> None:
        """As verl calls it, once its workers exist. Raises ValueError for settings that do not fit."""
        given = (self.config.engine_kwargs or {}).get("outrider")
        options = Options.of(OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given)
        if self.config.enable_rollout_routing_replay:
            raise ValueError("rollout.enable_rollout_routing_replay is not supported: no routed experts are returned")
        address = options.address(self.replica_rank)
        placed: dict[str, Any] = {}
        devices = ""
        if address is None:
            if self.world_size != self.config.tensor_model_parallel_size:
                raise ValueError(
                    "a replica that starts Outrider has rollout.tensor_model_parallel_size devices: set "
                    "data_parallel_size and pipeline_model_parallel_size to 1, or name gateways that run already in "
                    "rollout.engine_kwargs.outrider.addresses"
                )
            if self.nnodes > 1:
                raise ValueError(
                    f"a replica of {self.world_size} devices needs {self.nnodes} machines: start Outrider there, and "
                    "name its gateways in rollout.engine_kwargs.outrider.addresses"
                )
            node, devices = await self._place()
            placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        server = (
            ray.remote(OutriderServer)
            .options(
                name=server_name(self.replica_rank, kind, self.name_suffix),
                max_concurrency=self.max_concurrency,
                **placed,
            )
            .remote(self._facts(), options, address, {get_visible_devices_keyword(): devices} if devices else {})
        )
        self.servers = [server]
        await server.start.remote()
        url, _ = await server.endpoint.remote()
        self._server_handle = server
        self._server_address = url.partition("://")[2]

    async def start_profile(self, **_: Any) -> None:
        """Nothing: Outrider's processes are profiled by their own tools."""
        log.warning("Outrider's processes are not in the profile")

    async def stop_profile(self) -> None:
        """Nothing, as start_profile."""

    async def _place(self) -> tuple[str, str]:
        """Node of the workers, and the devices that they see."""
        keyword = get_visible_devices_keyword()

        def place(_: Any) -> tuple[str, str]:
            import os

            return ray.get_runtime_context().get_node_id(), os.environ.get(keyword, "")

        found = await asyncio.gather(*[worker.__ray_call__.remote(place) for worker in self.workers])
        return found[0][0], all_devices(seen for _, seen in found)

    def _facts(self) -> ReplicaFacts:
        config = self.config
        return ReplicaFacts(
            model_path=str(self.model_config.path),
            tp_size=config.tensor_model_parallel_size,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            ignore_eos=config.ignore_eos,
            seed=config.seed if config.full_determinism else None,
            frees_cache=config.free_cache_engine,
        )
