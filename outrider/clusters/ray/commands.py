"""The verbs `outrider ray up`, `status` and `down`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from outrider.clusters.ray.report import addresses, changes, state_table
from outrider.config import read_flags
from outrider.config.ray import RayClusterOptions, RayDownConfig, RayStatusConfig, RayUpConfig
from outrider.errors import ConfigError, EngineFault, Unavailable
from outrider.telemetry import setup_logging, write_line

USAGE = """\
usage: outrider ray VERB [FLAGS]        (outrider ray VERB --help shows the most used flags, --help-all every flag)

  up       place targets, drafts and gateways on a running Ray cluster, and return once they serve
  status   show the replicas of a pool, where they run, and their load
  down     stop a pool
"""

_POLL_SECONDS = 0.5
_HEAD_RESOURCE = "node:__internal_head__"  # which Ray gives to the head alone
_ANSWER_SECONDS = 30.0


def main(argv: Sequence[str]) -> int:
    """Run a verb. Returns the exit code. Raises OutriderError."""
    result: list[str] = []
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints messages of its own
        code = _run(argv, result.append)
    for text in result:
        sys.stdout.write(text + "\n")
    return code


def _run(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Run a verb. write: takes its result."""
    verb, flags = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("-h", "--help", "help"):
        write(USAGE.rstrip())
        return 0 if argv else 2
    if verb == "up":
        config, notes = read_flags(RayUpConfig, flags, "outrider ray up")
        return up(config, notes)
    if verb == "status":
        return status(read_flags(RayStatusConfig, flags, "outrider ray status")[0], write)
    if verb == "down":
        return down(read_flags(RayDownConfig, flags, "outrider ray down")[0])
    raise ConfigError(f'`outrider ray` has no verb "{verb}"; choose one of up, status, down')


@contextlib.contextmanager
def connected(options: RayClusterOptions) -> Iterator[None]:
    """A connection to the cluster. Raises ConfigError without Ray, or without a cluster."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(
            'outrider ray needs ray, which is not installed; run `pip install "outrider[ray]"` on every machine of the '
            "cluster"
        ) from None
    from outrider.clusters.ray.platform import NAMESPACE

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; avoids its warning
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(
            f"no Ray cluster can be reached {where}: {str(error).splitlines()[0]}; start one with `ray start --head`, "
            "and name it with --address or RAY_ADDRESS"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()  # it prints messages until then


def up(config: RayUpConfig, notes: Sequence[str] = ()) -> int:
    """Start a pool. Raises ConfigError or EngineFault if it does not start; nothing of it stays then."""
    setup_logging("ray", config.log_level, config.log_format)
    for note in notes:
        write_line(note)
    with connected(config):
        return _up(config)


def _up(config: RayUpConfig) -> int:
    import ray

    from outrider.clusters.ray.actor import ControllerActor
    from outrider.clusters.ray.plan import plan_pool
    from outrider.clusters.ray.platform import CONTROLLER, actors_of

    plan = plan_pool(config, ray.cluster_resources())
    known = ConfigError(
        f"the cluster has a pool {config.name} already; end it with `outrider ray down`, or choose another --name"
    )
    if actors_of(config.name):
        raise known
    try:
        controller: Any = ray.remote(ControllerActor).options(
            name=f"{config.name}/{CONTROLLER}", lifetime="detached", max_restarts=-1, num_cpus=0,
            scheduling_strategy=_at_the_head(),
        ).remote(plan)  # fmt: skip
    except ValueError:  # the name is taken since then
        raise known from None
    return _wait(controller, config)


def _at_the_head() -> Any:
    """On the cluster's head if it can run actors: a cluster that loses its head is lost as a whole."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    heads = [one["NodeID"] for one in ray.nodes() if one["Alive"] and _HEAD_RESOURCE in one["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"


def _wait(controller: Any, config: RayUpConfig) -> int:
    """Wait until the pool serves, and show what changes. Returns the exit code."""
    deadline = time.monotonic() + config.wait
    seen: dict[str, str] = {}
    while True:
        pool = _ask(controller, "describe", _ANSWER_SECONDS)
        for line in changes(seen, pool):
            write_line(line)
        if pool["serves"]:
            write_line(addresses(pool))
            return 0
        failed = [one for one in pool["units"] if one["state"] == "failed" and one["kind"] != "draft"]
        if failed:
            _end(controller, config.name)
            raise ConfigError(f"{failed[0]['unit']} does not start: {failed[0]['reason']}")
        if not config.wait:
            return 0
        if time.monotonic() > deadline:
            raise EngineFault(
                f"the pool does not serve after {config.wait:g} s; it goes on starting. `outrider ray status` shows "
                "what is missing, `outrider ray down` ends it"
            )
        time.sleep(_POLL_SECONDS)


def status(config: RayStatusConfig, write: Callable[[str], None]) -> int:
    """Show a pool. write: takes the text. The exit code is 0 if it serves, 1 if not."""
    with connected(config):
        pool = _ask(_controller(config.name), "describe", _ANSWER_SECONDS)
    write(json.dumps(pool, indent=2) if config.json else state_table(pool))
    return 0 if pool["serves"] else 1


def down(config: RayDownConfig) -> int:
    """End a pool. Raises ConfigError if there is none."""
    with connected(config):
        from outrider.clusters.ray.platform import actors_of

        if not actors_of(config.name):
            raise ConfigError(f"the cluster has no pool {config.name}; --name names another one")
        try:
            controller = _controller(config.name)
        except ConfigError:  # it was lost for good, or killed
            controller = None
        _end(controller, config.name)
    write_line(f"the pool {config.name} has ended")
    return 0


def _end(controller: Any, name: str) -> None:
    """End the pool in order if its controller answers, and then what is left of it."""
    from outrider.clusters.ray.platform import remove_all

    if controller is not None:
        try:
            seconds = _ask(controller, "describe", _ANSWER_SECONDS)["stop_seconds"]
            _ask(controller, "stop", seconds)
        except Unavailable as error:
            write_line(f"{error.message}; its processes are ended at once")
    remove_all(name)


def _controller(name: str) -> Any:
    import ray

    from outrider.clusters.ray.platform import CONTROLLER

    try:
        return ray.get_actor(f"{name}/{CONTROLLER}")
    except ValueError:
        raise ConfigError(f"the cluster has no pool {name}; `outrider ray up` starts one") from None


def _ask(controller: Any, method: str, seconds: float) -> Any:
    """Call the controller. Raises Unavailable if it does not answer in time."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    deadline = time.monotonic() + seconds
    while True:
        try:
            return ray.get(getattr(controller, method).remote(), timeout=max(0.1, deadline - time.monotonic()))
        except RayTaskError:
            raise
        except (GetTimeoutError, RayActorError) as error:  # it is being started, or started again
            if time.monotonic() > deadline:
                raise Unavailable(f"the controller does not answer ({type(error).__name__})") from None
            time.sleep(_POLL_SECONDS)
