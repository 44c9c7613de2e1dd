"""Dashboards: a running system has every metric that the dashboard reads, and all files parse."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway.services import until
from tests.support.system.serve import System
from tests.support.tiny import write_model, write_tokenizer

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "docker" / "observe"
DASHBOARD = json.loads((OBSERVE / "dashboards" / "outrider.json").read_text())
METRIC = re.compile(r"\b(?:outrider|vllm|sglang)[a-z_:]*[a-z]\b")


def expressions(panels=DASHBOARD["panels"]):
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from expressions(panel.get("panels", ()))


def service(name):
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][name]


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """Samples of /metrics of a system that has served a few requests with draft tokens, by name."""
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("target")))
    system = System(folder, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4").wait()

    def samples():
        text = httpx.get(f"{system.url}/metrics").text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: [s for s in found if s.name == sample.name] for sample in found}

    def has_draft_tokens():
        system.ask("a b a b a b", max_tokens=200)
        return sum(sample.value for sample in samples().get("outrider_received_draft_tokens_total", ()))

    try:
        system.ask_all()
        until(has_draft_tokens, seconds=60)
        yield samples()
    finally:
        assert system.stop() == 0


@pytest.mark.system
def test_every_metric_of_the_dashboard_is_exposed(exposed):
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 30
    assert asked - exposed.keys() == set()


@pytest.mark.system
def test_labels_that_the_dashboard_groups_by_are_there(exposed):
    for expression in expressions():
        for labels, name in re.findall(r"by \(([a-z, ]+)\) \((?:rate\()?([a-z_]+)", expression):
            for label in labels.split(", "):
                assert all(label in sample.labels for sample in exposed[name]), expression


@pytest.mark.system
def test_draft_tokens_are_accounted_for(exposed):
    def total(name):
        return sum(sample.value for sample in exposed[name])

    misses = {s.labels["cause"]: s.value for s in exposed["outrider_steps_without_draft_by_cause_total"]}
    assert set(misses) == {"without_drafter", "paused", "late", "empty", "not_selected"}
    assert total("outrider_received_draft_tokens_total") > 0
    verified = total("outrider_verified_draft_tokens_total")
    assert verified + total("outrider_unverified_draft_tokens_total") == total("outrider_received_draft_tokens_total")
    accepted = total("outrider_accepted_draft_tokens_total")
    assert total("outrider_rejected_draft_tokens_total") == verified - accepted
    assert total("outrider_accepted_draft_tokens_by_position_total") == accepted
    assert total("outrider_draft_lag_tokens_count") > 0
    same = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "outrider_generated_tokens_total")
    assert len({total(name) for name in same}) == 1
    finished = {s.labels["finished_reason"]: s.value for s in exposed["vllm:request_success_total"]}
    assert finished["length"] == total("sglang:num_requests_total") == total("outrider_request_duration_seconds_count")
    assert 0 <= total("vllm:kv_cache_usage_perc") == total("sglang:token_usage") <= 1
    for prefix in ("vllm", "sglang"):
        assert total(f"{prefix}:e2e_request_latency_seconds_count") == finished["length"]


def test_panels_are_whole_and_do_not_overlap():
    places, ids = set(), set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells
        assert panel["id"] not in ids
        ids.add(panel["id"])
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
    for expression in expressions():
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("[") == expression.count("]"), expression


def test_grafana_finds_its_dashboard_and_its_data():
    provisioning = OBSERVE / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "outrider.yaml").read_text())["providers"]
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["current"]["value"]) == ("source", source["uid"])
    grafana = service("grafana")
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"] if volume.startswith("./"))
    assert {ROOT / path for path in mounts} == {provisioning, OBSERVE / "dashboards"}
    assert mounts["./docker/observe/dashboards"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    assert grafana["depends_on"] == ["prometheus"]


def test_prometheus_asks_the_gateways_of_compose():
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (lookup,) = job["dns_sd_configs"]
    prometheus = service("prometheus")
    assert "./docker/observe/prometheus.yml:/etc/prometheus/prometheus.yml:ro" in prometheus["volumes"]
    for name in lookup["names"]:
        gateway = service(name)
        assert any(port.endswith(f":{lookup['port']}") for port in gateway["ports"])
        assert set(gateway.get("networks", ["default"])) & set(prometheus.get("networks", ["default"]))


def test_images_name_no_registry():
    for name in ("prometheus", "grafana"):
        image = re.fullmatch(r"\$\{[A-Z_]+:-(.+)\}", service(name)["image"]).group(1)
        assert "." not in image.split("/")[0]
        assert service(name)["profiles"] == ["observe"]
