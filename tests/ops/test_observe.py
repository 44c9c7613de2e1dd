"""Dashboards: all files parse and fit each other. What a running system exposes: tests/system/test_telemetry.py."""

import re
from pathlib import Path

import yaml

from tests.support.dashboard import DASHBOARD, OBSERVE, expressions

ROOT = Path(__file__).parents[2]


def service(name):
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][name]


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
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert sorted(lookup["names"]) == sorted(name for name in composed if name.startswith("gateway"))
    assert lookup["type"] == "A"  # every container of a name
    for name in lookup["names"]:
        gateway = service(name)
        assert any(port.endswith(f":{lookup['port']}") for port in gateway["ports"])
        assert set(gateway.get("networks", ["default"])) & set(prometheus.get("networks", ["default"]))


def test_images_name_no_registry():
    for name in ("prometheus", "grafana"):
        image = re.fullmatch(r"\$\{[A-Z_]+:-(.+)\}", service(name)["image"]).group(1)
        assert "." not in image.split("/")[0]
        assert service(name)["profiles"] == ["observe"]
