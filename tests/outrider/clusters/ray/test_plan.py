"""What `outrider ray up` places: bundles, strategies, flags of the processes, and where secrets go."""

import pytest

from outrider.clusters.ray.plan import Bundle, Kind, plan_pool
from outrider.config import read_flags, to_argv
from outrider.config.ray import RayUpConfig
from outrider.errors import ConfigError
from outrider.service_token import new_token

NO_GPUS, GPUS = {"CPU": 64.0}, {"CPU": 64.0, "GPU": 16.0}


def planned(*flags, cluster=NO_GPUS):
    config, _ = read_flags(RayUpConfig, [*flags], "outrider ray up")
    return plan_pool(config, cluster)


def test_a_pool_on_cpus():
    plan = planned("--target-replicas", "1:4", "--target-cpus", "8", "--draft-replicas", "2", "--gateways", "2")
    target, draft, gateway = (plan.units[kind] for kind in (Kind.TARGET, Kind.DRAFT, Kind.GATEWAY))
    assert (target.bundles, target.strategy, target.config.device) == ((Bundle(8),), "STRICT_PACK", "cpu")
    assert draft.bundles == (Bundle(1),)
    assert (gateway.bundles, gateway.strategy) == ((Bundle(1),) * 2, "STRICT_SPREAD")
    assert [str(plan.bounds(kind)) for kind in Kind] == ["1", "1:4", "2"]
    assert (gateway.config.target, gateway.config.draft) == ((), ())


@pytest.mark.parametrize(
    ("flags", "bundles", "strategy"),
    [
        ((), (Bundle(1, 1),), "STRICT_PACK"),
        (("--tp-size", "4"), (Bundle(4, 4),), "STRICT_PACK"),  # all ranks on one machine
        (("--tp-size", "4", "--target-cpus", "9"), (Bundle(9, 4),), "STRICT_PACK"),
        (("--tp-size", "16", "--nnodes", "2"), (Bundle(8, 8),) * 2, "STRICT_SPREAD"),  # or half of them on each of two
        (("--target-gpus", "0"), (Bundle(1),), "STRICT_PACK"),
    ],
)
def test_a_tensor_parallel_target_is_one_unit(flags, bundles, strategy):
    unit = planned(*flags, cluster=GPUS).units[Kind.TARGET]
    assert (unit.bundles, unit.strategy) == (bundles, strategy)
    assert unit.ranks_span_machines == (len(bundles) > 1)
    assert unit.config.device == ("cpu" if "0" in flags else "cuda")


def test_the_drafter_is_chosen_for_devices_of_its_own():
    auto = planned(cluster=GPUS)
    assert auto.units[Kind.DRAFT].config.speculative_algorithm == "EAGLE3"
    assert auto.units[Kind.DRAFT].config.draft_device == "cpu"
    assert auto.units[Kind.DRAFT].config.model_path == "default"
    assert auto.units[Kind.TARGET].config.self_speculation == "auto"
    device = planned("--draft-gpus", "1", cluster=GPUS).units[Kind.DRAFT]
    assert (device.config.draft_device, device.bundles) == ("cuda", (Bundle(1, gpus=1),))
    tpu = planned("--draft-tpus", "4", "--draft-tp-size", "4").units[Kind.DRAFT]
    assert (tpu.config.draft_device, tpu.bundles[0].resources) == ("tpu", {"CPU": 1.0, "TPU": 4.0})
    assert planned("--speculative-algorithm", "NGRAM").units[Kind.TARGET].config.self_speculation == "off"
    none = planned("--speculative-algorithm", "NONE", "--draft-replicas", "2")
    assert str(none.bounds(Kind.DRAFT)) == "0"


def test_a_fixed_tree_reaches_both_services():
    flags = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "9")
    plan = planned("--speculative-algorithm", "EAGLE3", *flags)
    assert plan.units[Kind.TARGET].config.speculative_num_draft_tokens == 4
    assert plan.units[Kind.DRAFT].config.speculative_num_draft_tokens == 4


def test_secrets_are_in_no_flag_and_in_no_text(tmp_path, monkeypatch):
    token = new_token()
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    monkeypatch.setenv("OUTRIDER_ADMIN_API_KEY", "admin-key")
    monkeypatch.setenv("OUTRIDER_SERVICE_TOKEN", token)
    plan = planned("--api-key", "flag-key", "--api-key-file", str(keys))
    gateway = plan.units[Kind.GATEWAY]
    assert gateway.environment["OUTRIDER_API_KEY"].split() == ["flag-key", "first-key", "second-key"]
    assert gateway.environment["OUTRIDER_ADMIN_API_KEY"] == "admin-key"
    for unit in plan.units.values():
        assert unit.environment["OUTRIDER_SERVICE_TOKEN"] == token
        shown = " ".join(to_argv(unit.config)) + repr(plan)
        assert not [secret for secret in (token, "flag-key", "first-key", "admin-key", str(keys)) if secret in shown]


def test_a_token_is_made_without_one():
    first, second = planned(), planned()
    tokens = {unit.environment["OUTRIDER_SERVICE_TOKEN"] for plan in (first, second) for unit in plan.units.values()}
    assert len(tokens) == 2


def test_gateways_on_free_ports_may_share_a_machine():
    assert planned("--port", "0", "--gateways", "2").units[Kind.GATEWAY].strategy == "SPREAD"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--target-replicas", "0"), "--target-replicas 0: write MIN:MAX with 1"),
        (("--target-gpus", "4"), "write --tp-size 4 as well"),
        (("--device", "cuda:1"), "Ray chooses the devices"),
        (("--draft-gpus", "2"), "--draft-gpus 2 and --draft-tp-size 1"),
        (("--draft-gpus", "1", "--draft-tpus", "1"), "leave one out"),
        (("--tp-size", "4", "--nnodes", "2", "--node-rank", "1"), "the controller chooses them"),
        (("--tp-size", "4", "--nnodes", "3"), "must divide --tp-size 4"),
        (("--scale-down-load", "0.9"), "the first must be smaller"),
        (("--scale-up-seconds", "-1"), "--scale-up-seconds must be 0 or more"),
        (("--scale-up-late", "2"), "--scale-up-late must lie in"),
        (("--gateways", "0"), "--gateways must be 1 or more"),
        (("--target-cpus", "0"), "--target-cpus must be 1 or more"),
        (("--draft-cpus", "0"), "--draft-cpus must be 1 or more"),
        (("--name", "a/b"), "letters, digits"),
        (("--control-socket", "/tmp/x"), "leave out --control-socket"),
        (("--port", "30001"), "--port and --grpc-port are both 30001"),
        (("--speculative-algorithm", "STANDALONE"), "needs a draft model"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        planned(*flags, cluster=GPUS)
