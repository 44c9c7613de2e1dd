"""How the objects of the Helm chart belong together: names, ports, Secrets, metrics, and values that are refused."""

import base64
import re
import tomllib
from dataclasses import replace

import pytest
import yaml

from gateway.process.models_file import model_configs
from gateway.telemetry.metrics import Metrics
from outrider.service_token import read_token
from outrider.wire.v1 import common_pb2
from tests.support.outrider.chart import (
    FOLDER,
    LEADER,
    NAMESPACE,
    ROOT,
    VALUES,
    config_of,
    container_of,
    of_kind,
    render,
    rendered,
    selector_of,
    templates,
    upgraded,
    values_of,
    workloads,
)

helm = pytest.importorskip("helm_python", reason="Helm is missing; `make chart` installs it and runs these tests")

PORTS = {"target": 30010, "draft": 30020}
COMPONENT = "app.kubernetes.io/component"
every_chart = pytest.mark.parametrize("values", VALUES)


@every_chart
def test_gateways_find_the_services_and_nothing_else_does(values):
    objects, present = rendered(values), dict(workloads(values))
    services, policies = of_kind(objects, "Service"), of_kind(objects, "NetworkPolicy")
    assert services.keys() == present.keys()
    pods = {component: template["metadata"]["labels"] for component, node, template in templates(values) if not node}
    config = next((config_of(*one) for one in templates(values) if one[0] == "gateway"), None)
    for name in ("target", "draft"):
        if config is not None:
            addresses = [one for one in getattr(config, name) if one.startswith("dns:")]
            here = [f"dns:{services[name]['metadata']['name']}:{PORTS[name]}"] if name in present else []
            assert config.models or addresses == here
        if name not in present:
            continue
        service = services[name]["spec"]
        (port,) = service["ports"]
        assert port["port"] == PORTS[name]
        assert service["clusterIP"] == "None"
        assert "publishNotReadyAddresses" not in service
        assert config_of(*next(one for one in templates(values) if one[0] == name)).listen.endswith(f":{port['port']}")
        assert service["selector"].items() - {(LEADER, "0")} <= pods[name].items()
        assert [component for component in pods if selector_of(values, name).items() <= pods[component].items()] == [
            name
        ]
        allowed = policies[name]["spec"]["ingress"][0]
        assert policies[name]["spec"]["podSelector"] == {"matchLabels": selector_of(values, name)}
        assert allowed["ports"] == [{"port": "grpc", "protocol": "TCP"}]
        gateways = {"podSelector": {"matchLabels": {**selector_of(values, name), COMPONENT: "gateway"}}}
        others = values_of(values).get("networkPolicy", {}).get("serviceClients", [])
        assert allowed["from"] == [gateways, *others]
    if config is not None:
        assert services["gateway"]["spec"]["type"] == "ClusterIP"
    for component, one in workloads(values).items():
        if one["kind"] != "LeaderWorkerSet":
            assert one["spec"]["selector"]["matchLabels"] == selector_of(values, component)


def test_a_gateway_of_several_models_has_their_file(tmp_path):
    """Pools of releases of their own, which let it in and scale by its metrics."""
    (gateway,) = templates("models")
    config = config_of(*gateway)
    (mount,) = (one for one in container_of(gateway[2])["volumeMounts"] if one["name"] == "models")
    (volume,) = (one for one in gateway[2]["spec"]["volumes"] if one["name"] == "models")
    (files,) = (one for one in rendered("models") if one["kind"] == "ConfigMap")
    assert volume["configMap"]["name"] == files["metadata"]["name"]
    ((name, text),) = files["data"].items()
    assert config.models == f"{mount['mountPath']}/{name}"
    (tmp_path / name).write_text(text)
    first, second = model_configs(replace(config, models=str(tmp_path / name)))
    assert first.target == ("dns:qwen-outrider-target:30010",)
    assert second.served_model_name == ("meta-llama/Llama-3.1-8B-Instruct",)
    before = gateway[2]["metadata"]["annotations"]
    later = values_of("models") | {"gateway": {"models": text.replace("qwen", "other")}}
    (other,) = (one for one in render(later) if one["kind"] == "Deployment")
    annotations = other["spec"]["template"]["metadata"]["annotations"]
    assert annotations["outrider/models"] != before["outrider/models"]  # the file is read at the start alone
    assert before["example.com/team"] == "llm"
    scalers = of_kind(rendered("pool"), "HorizontalPodAutoscaler")
    assert scalers.keys() == {"target", "draft"}
    for scaler in scalers.values():
        (metric,) = scaler["spec"]["metrics"]
        labels = {"job": "shared-outrider-gateway", "model": "qwen3-8b"}
        assert metric["external"]["metric"]["selector"] == {"matchLabels": labels}


@every_chart
def test_every_secret_is_made_or_named(values, tmp_path):
    made = {one["metadata"]["name"]: one["data"] for one in rendered(values) if one["kind"] == "Secret"}
    given = {
        word
        for key in ("auth", "tls", "huggingface", "image")
        for word in re.findall(r"[\w-]+", str(values_of(values).get(key)))
    }
    for _, _, template in templates(values):
        for volume in template["spec"]["volumes"]:
            sources = [one["secret"] for one in volume.get("projected", {}).get("sources", [])]
            if "secret" in volume:
                sources.append({"name": volume["secret"]["secretName"], **volume["secret"]})
            for source in sources:
                assert source["name"] in made or source["name"] in given
                for item in source.get("items", []):
                    assert item["key"] in made.get(source["name"], {item["key"]})
            assert volume.get("secret", volume.get("projected", {})).get("defaultMode", 0o440) == 0o440
    for name, data in made.items():
        for key, value in data.items():
            file = tmp_path / key
            file.write_bytes(base64.b64decode(value))
            assert len(read_token(str(file))) == 48
            assert base64.b64decode(value).decode() not in str(
                [one for one in rendered(values) if one["kind"] != "Secret"]
            )
            assert name.startswith(("prod-", "big-"))


def test_secrets_are_made_once():
    def secrets(objects):
        return {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "Secret"}

    first, again = secrets(render({})), secrets(render({}))
    assert first.keys() == again.keys() == {"prod-outrider-service-token", "prod-outrider-keys"}
    assert first["prod-outrider-keys"]["api-keys"] != again["prod-outrider-keys"]["api-keys"]
    assert first["prod-outrider-keys"]["api-keys"] != first["prod-outrider-keys"]["admin-keys"]
    known = {
        name: {key: base64.b64decode(value).decode() for key, value in data.items()} for name, data in first.items()
    }
    assert secrets(upgraded(known)) == first
    del known["prod-outrider-keys"]["admin-keys"]
    later = secrets(upgraded(known))
    assert later["prod-outrider-keys"]["api-keys"] == first["prod-outrider-keys"]["api-keys"]
    assert later["prod-outrider-keys"]["admin-keys"] not in ("", first["prod-outrider-keys"]["admin-keys"])


@pytest.mark.parametrize("values", ["gpus", "multinode"])
def test_services_scale_by_metrics_that_the_gateway_has(values):
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    rules = {rule["name"]["as"]: rule["metricsQuery"] for rule in adapter}
    assert all(rule["seriesQuery"].partition("{")[0] in rule["metricsQuery"] for rule in adapter)
    scalers = of_kind(rendered(values), "HorizontalPodAutoscaler", "ScaledObject")
    present = workloads(values)
    queries = {}
    for component in ("target", "draft"):
        spec = scalers[component]["spec"]
        one = present[component]
        aim = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": one["metadata"]["name"]}
        assert spec["scaleTargetRef"] == aim
        assert "replicas" not in one["spec"]
        if scalers[component]["kind"] == "ScaledObject":
            for trigger in spec["triggers"]:
                query = trigger["metadata"]["query"]
                assert f'namespace="{NAMESPACE}",job="big-gateway"' in query
                queries[query.replace(f'namespace="{NAMESPACE}",job="big-gateway"', "<<.LabelMatchers>>")] = trigger
        else:
            for metric in spec["metrics"]:
                found = metric["external"]["metric"]
                assert found["selector"] == {"matchLabels": {"job": "prod-outrider-gateway"}}
                queries[rules[found["name"]]] = metric
    assert {" ".join(query.split()) for query in queries} == {" ".join(query.split()) for query in rules.values()}
    metrics = Metrics()
    load = common_pb2.EngineLoad(draft_stats=common_pb2.DraftStats(lag_histogram=[1]))
    for service in ("target", "draft"):
        metrics.services.update(service, "a", load)
    page = metrics.render().decode()
    for name, labels in re.findall(r"(outrider_\w+)\{(?:service=\"(\w+)\")?", " ".join(queries)):
        assert f'{name}{{address="a"' in page
        assert not labels or f'{name}{{address="a",service="{labels}"}}' in page
    monitor = of_kind(rendered(values), "ServiceMonitor")["gateway"]["spec"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["honorLabels"] is True  # the label "service" of the queries is the gateway's own
    assert monitor["selector"]["matchLabels"] == selector_of(values, "gateway")
    assert endpoint["port"] in [
        port["name"] for port in of_kind(rendered(values), "Service")["gateway"]["spec"]["ports"]
    ]


@every_chart
def test_disruption_budgets_let_nodes_be_drained(values):
    budgets = of_kind(rendered(values), "PodDisruptionBudget")
    assert budgets.keys() == (set() if values == "bare" else workloads(values).keys())
    for component, budget in budgets.items():
        assert budget["spec"]["maxUnavailable"] == 1  # minAvailable 1 would hold a node with the only replica
        assert budget["spec"]["selector"] == {"matchLabels": selector_of(values, component)}


def test_what_is_switched_off_is_absent():
    assert sorted(one["kind"] for one in rendered("bare")) == ["Deployment", "Secret", "Service"]
    ((_, _, template),) = templates("bare")
    config = config_of("gateway", 0, template)
    assert (config.target, config.draft, config.api_key_file) == ((), (), None)
    assert config.admin_api_key_file == "/run/outrider/admin-keys"


def test_an_ingress_names_hosts_that_the_gateway_accepts():
    ingress = of_kind(rendered("gpus"), "Ingress")["gateway"]["spec"]
    config = next(config_of(*one) for one in templates("gpus") if one[0] == "gateway")
    assert config.allowed_hosts == tuple(rule["host"] for rule in ingress["rules"]) == ("api.example.com",)
    (path,) = ingress["rules"][0]["http"]["paths"]
    service = of_kind(rendered("gpus"), "Service")["gateway"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"target": {"acelerator": "nvidia"}}, "acelerator"),
        ({"target": {"accelerator": "tpu"}}, "accelerator"),
        ({"draft": {"algorithm": "EAGLE4"}}, "algorithm"),
        ({"target": {"tensorParallel": 3, "nodes": 2}}, "must divide"),
        ({"gateway": {"models": "[a]"}}, "set target.enabled and draft.enabled to false"),
        ({"target": {"tensorParallel": 2, "nodes": 2, "cache": {"kind": "perReplica"}}}, "perReplica"),
        ({"draft": {"cache": {"kind": "claim"}}}, "draft.cache.existingClaim"),
        ({"tls": {"services": {"enabled": True}}}, "tls.services.existingSecret"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts"),
        (
            {"draft": {"autoscaling": {"enabled": True}}, "autoscaling": {"provider": "keda"}},
            "autoscaling.prometheusAddress",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(values, words):
    with pytest.raises(helm.HelmError, match=re.escape(words)):
        render(values)


def test_the_version_is_that_of_the_project():
    chart = yaml.safe_load((FOLDER / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
    assert chart["kubeVersion"] == ">=1.27.0-0"  # of the test of schemas
