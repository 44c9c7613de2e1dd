"""The rollout engine in verl's workers: it sends a trainer's weights to the gateway."""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from outrider.integrations.rollouts import RolloutGateway
from outrider.integrations.verl.names import server_name


class OutriderRollout(BaseRollout):  # type: ignore[misc]  # verl is not installed where this is checked
    """One of the workers of a replica; the first of them sends. All read the weights, as gathering them wants."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """As verl's other engines. replica_rank: by default that of this worker's rank."""
        super().__init__(config, model_config, device_mesh)
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank < 0 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """Take the KV cache's memory again; weights were kept."""
        if self.is_leader_rank and "kv_cache" in tags:
            await self._server().resume_kv_cache.remote()

    async def release(self) -> None:
        """Release the KV cache's memory; weights are kept."""
        if self.is_leader_rank:
            await self._server().release_kv_cache.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Replace the weights, whose version becomes `global_steps`. Raises RolloutError for those that do not fit."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"checkpoint engines that send {wire_format} are not supported; choose another")
        if options.get("peft_config") is not None:
            raise NotImplementedError("LoRA adapters are not served; set actor_rollout_ref.model.lora.merge=True")
        tensors = ensure_async_iterator(weights)
        if not self.is_leader_rank:
            async for _ in tensors:
                pass
            return
        server = self._server()
        url, key = await server.endpoint.remote()
        version = None if global_steps is None else str(global_steps)
        bucket_bytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async with RolloutGateway(url, key) as gateway:
            await gateway.update_weights(tensors, version, bucket_bytes)
        if global_steps is not None:
            await server.set_global_steps.remote(global_steps)

    def _server(self) -> Any:
        return ray.get_actor(server_name(self.replica_rank))
