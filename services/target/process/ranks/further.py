"""A further machine of a target: it computes its ranks until machine 0 ends, and serves nothing."""

from __future__ import annotations

import asyncio
import logging
import signal

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.config.ranks import check_ranks, rank_places
from services.target.model.loading.shards import check_devices
from services.target.process.ranks.machines import MachineWatch
from services.target.process.ranks.processes import EXIT_SECONDS, RankProcesses

log = logging.getLogger(__name__)


async def serve_ranks(config: TargetConfig) -> int:
    """Compute this machine's ranks. Returns the exit code: 0 if machine 0 has ended them, or after a signal.

    Raises ConfigError.
    """
    check_ranks(config)
    places = rank_places(config)
    check_devices(places.devices)
    assert config.dist_init_addr is not None, "checked with the ranks"
    folder = await asyncio.to_thread(checkpoint.resolve, config.model_path, whole=True)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    reasons: list[str] = []

    def end(reason: str) -> None:
        reasons.append(reason)
        loop.call_soon_threadsafe(ended.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    ranks = RankProcesses(places.here, config.dist_init_addr, folder, config, end)
    watch = MachineWatch(config.dist_init_addr, config, end)
    log.info("machine %d of %d computes ranks %s for %s", config.node_rank, config.nnodes,
             ", ".join(map(str, places.here)), config.dist_init_addr)  # fmt: skip
    await ended.wait()
    watch.stop()
    codes = await asyncio.to_thread(ranks.codes, EXIT_SECONDS) if reasons else []
    ranks.stop()
    if not reasons:  # a signal
        return 0
    if codes == [0] * len(places.here):
        watch.leave()
        return 0
    log.error("%s", reasons[0])
    return 2 if 2 in codes else 1
