"""Settings of verl, and its interface where it is installed; tests/system/control/test_rollouts.py has the rollouts."""

import inspect

import pytest

from outrider.integrations.verl.names import server_name
from outrider.integrations.verl.options import Options, all_devices
from outrider.integrations.verl.server import OutriderServer, seed_of


def test_settings():
    options = Options.of({"addresses": ["a:1", "b:2"]})
    assert [options.address(rank) for rank in (0, 1)] == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="names 2 gateways, and verl makes a replica 3"):
        options.address(2)
    with pytest.raises(ValueError, match="adresses is unknown"):
        Options.of({"adresses": []})
    assert Options.of(None).address(0) is None


def test_seeds_are_those_of_the_last_run():
    assert seed_of(42, "det-0") == 39588185170762294
    assert len({seed_of(seed, name) for seed in (1, 2) for name in ("det-0", "det-1")}) == 4
    assert server_name(0) != server_name(0, "teacher") != server_name(0, "teacher", "_math")


@pytest.mark.parametrize(
    ("seen", "devices"),
    [(["2,3", "10, 2", ""], "2,3,10"), (["GPU-b1,GPU-a2", "GPU-a2"], "GPU-b1,GPU-a2"), (["", ""], "")],
)
def test_a_gateway_sees_the_devices_of_all_its_workers(seen, devices):
    assert all_devices(seen) == devices


def test_verl_finds_the_engine():
    replicas = pytest.importorskip("verl.workers.rollout.replica")
    from verl.workers.rollout.base import get_rollout_class

    from outrider.integrations.verl import plugin

    found = replicas.RolloutReplicaRegistry.get(plugin.NAME)
    assert issubclass(found, replicas.RolloutReplica)
    assert not inspect.isabstract(found)
    assert not inspect.isabstract(get_rollout_class(plugin.NAME))
    called = {"wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache", "release_kv_cache"}
    assert called | {"resume_kv_cache", "generate", "set_global_steps"} <= set(dir(OutriderServer))
