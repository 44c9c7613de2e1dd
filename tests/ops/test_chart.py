"""Pods of the Helm chart: what Helm makes of it fits Kubernetes' schemas and our processes' flags, ports and routes."""

import copy
import re
from dataclasses import replace

import pytest
import tyro
from fastapi import FastAPI

from gateway.api.routes import health
from outrider.cli import Healthcheck
from outrider.config.ranks import rank_places
from tests.support.outrider import custom_resources
from tests.support.outrider.chart import (
    FOLDER,
    LEADER,
    NAMESPACE,
    RELEASE,
    VALUES,
    component_of,
    config_of,
    container_of,
    image_of,
    of_kind,
    rendered,
    selector_of,
    settings_of,
    templates,
    values_of,
    workloads,
)

helm = pytest.importorskip("helm_python", reason="Helm is missing; `make chart` installs it and runs these tests")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make chart` installs the schemas")
jsonschema = pytest.importorskip("jsonschema", reason="`make chart` installs it")

OLDEST, NEWEST = "1.27", "1.37"  # OLDEST: the chart's kubeVersion
every_chart = pytest.mark.parametrize("values", VALUES)


@every_chart
def test_helm_accepts_the_chart(values):
    report = helm.lint(FOLDER, values_of(values), strict=True)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(values)]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 and name.startswith(("prod-outrider-", "big-")) for _, name in names)
    assert all(one["metadata"]["namespace"] == NAMESPACE for one in rendered(values))


@every_chart
def test_the_objects_fit_the_published_schemas(values):
    version = OLDEST if values in ("default", "tpu") else NEWEST
    for one in rendered(values):
        if one["kind"] in custom_resources.USED:
            custom_resources.check(one)
        else:
            kubernetes_validate.validate(one, version, strict=True)
        if one["kind"] == "ScaledObject":  # KEDA makes a HorizontalPodAutoscaler of it
            behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            aim, most = one["spec"]["scaleTargetRef"], one["spec"]["maxReplicaCount"]
            scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "x"}}
            scaler["spec"] = {"scaleTargetRef": aim, "maxReplicas": most, "behavior": behavior}
            kubernetes_validate.validate(scaler, NEWEST, strict=True)
    for component, _, template in templates(values):
        if workloads(values)[component]["kind"] == "LeaderWorkerSet":
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(pod, NEWEST, strict=True)


def test_the_schemas_refuse_what_is_wrong():
    (one,) = (o for o in rendered("default") if o["kind"] == "Deployment" and component_of(o) == "draft")
    wrong = copy.deepcopy(one)
    container_of(wrong["spec"]["template"])["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("LeaderWorkerSet", ["spec", "leaderWorkerTemplate", "restartPolicy"], "Always"),
        ("LeaderWorkerSet", ["spec", "leaderWorkerTemplate", "templates"], []),
        ("LeaderWorkerSet", ["apiVersion"], "leaderworkerset.x-k8s.io/v1alpha1"),
        ("ScaledObject", ["spec", "minReplicas"], 1),
        ("ScaledObject", ["spec", "triggers", 0, "metadata", "threshold"], 32),
        ("ScaledObject", ["spec", "triggers", 0, "metricType"], "Utilization"),
        ("ServiceMonitor", ["spec", "endpoints", 0, "interval"], "15"),
        ("ServiceMonitor", ["spec", "endpoints", 0, "tlsConfig", "skipVerify"], True),
    ],
)
def test_the_structures_of_other_controllers_refuse_what_is_wrong(kind, path, value):
    wrong = copy.deepcopy(next(one for one in rendered("multinode") if one["kind"] == kind))
    custom_resources.check(wrong)
    inner = wrong
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        custom_resources.check(wrong)


def test_a_target_of_several_nodes_is_a_leader_worker_set():
    """Fields as in leaderworkerset.x-k8s.io/v1 and its documentation."""
    target = workloads("multinode")["target"]
    assert target["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    group = target["spec"]["leaderWorkerTemplate"]
    assert group.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, worker = (template for _, _, template in templates("multinode") if template in group.values())
    assert container_of(leader)["args"] == container_of(worker)["args"]  # ranks differ by the controller's variables
    # Only the leader serves; the others end with it, and have no port.
    assert "readinessProbe" in container_of(leader)
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & container_of(worker).keys()
    places = [rank_places(config_of("target", node, template)) for node, template in enumerate((leader, worker))]
    assert [place.here for place in places] == [range(8), range(8, 16)]
    address = config_of("target", 1, worker).dist_init_addr
    assert address == f"{RELEASE}-0.{RELEASE}.{NAMESPACE}:29500"
    variables = {one["name"]: one["value"] for one in container_of(worker)["env"]}
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "bond0"
    service = of_kind(rendered("multinode"), "Service")["target"]
    assert service["spec"]["selector"][LEADER] == "0"
    # The controller takes a Service of the set's name for its own, which has pods that are not ready, too: else ranks
    # would wait for the leader's name, and the leader for them.
    assert service["metadata"]["name"] == f"{target['metadata']['name']}-leaders"
    _, ranks = of_kind(rendered("multinode"), "NetworkPolicy")["target"]["spec"]["ingress"]
    assert "ports" not in ranks  # NCCL and gloo choose theirs
    assert ranks["from"] == [{"podSelector": {"matchLabels": selector_of("multinode", "target")}}]


@every_chart
def test_the_flags_exist_and_fit_together(values, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    for component, node, template in templates(values):
        config = config_of(component, node, template)
        if component == "gateway":
            files = {key: str(keys) for key in ("api_key_file", "admin_api_key_file") if getattr(config, key)}
            replace(config, **files).check()
        elif component == "target":
            config.check()
        mounts = {mount["name"]: mount["mountPath"] for mount in container_of(template)["volumeMounts"]}
        assert config.service_token_file == f"{mounts['secrets']}/token"
        if component != "gateway":
            assert not config.allow_unauthenticated
            assert config.ssl_certfile == (f"{mounts['tls']}/tls.crt" if "tls" in mounts else None)
        if component == "gateway" and "tls" in mounts:
            assert config.service_ssl_ca_certs == f"{mounts['tls']}/ca.crt"


@every_chart
def test_containers_are_confined(values):
    for component, _, template in templates(values):
        pod, container = template["spec"], container_of(template)
        user = pod["securityContext"]
        assert (user["runAsNonRoot"], user["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert f"--uid {user['runAsUser']} outrider" in image_of(component)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in container["resources"]["limits"]
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
        claims = [
            one["metadata"]["name"] for one in workloads(values)[component]["spec"].get("volumeClaimTemplates", [])
        ]
        volumes = {volume["name"]: volume for volume in pod["volumes"]} | {name: {} for name in claims}
        assert mounted.keys() == volumes.keys()
        assert "hostPath" not in str(volumes)
        assert all(
            mounted[name]["readOnly"] for name, volume in volumes.items() if {"secret", "projected"} & volume.keys()
        )
        written = {mount["mountPath"] for mount in mounted.values() if not mount.get("readOnly")}
        folders = [one["value"] for one in container.get("env", []) if str(one.get("value")).startswith("/")]
        assert all(any(folder.startswith(path) for path in written) for folder in folders)


@every_chart
def test_probes_ask_what_the_processes_answer(values):
    app = FastAPI()
    health.install(app, ())  # of no model: the paths are the same
    paths = {route.path for route in app.routes}
    for component, node, template in templates(values):
        container = container_of(template)
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        assert [str(port) for port in ports.values()] == (
            [] if node else re.search(r"EXPOSE (.+)", image_of(component))[1].split()
        )
        if node:
            continue
        probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
        config = config_of(component, node, template)
        if component == "gateway":
            asked = [probe["httpGet"]["path"] for probe in probes]
            assert asked == ["/health/live", "/health/live", "/health/ready"]
            assert paths.issuperset(asked)
            assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
            assert {probe["httpGet"]["scheme"] for probe in probes} == {"HTTPS" if config.ssl_certfile else "HTTP"}
            assert config.port == ports["http"]
            assert config.grpc_port == ports["grpc"]
            continue
        assert config.listen == f"0.0.0.0:{ports['grpc']}"
        for probe in probes:
            if config.ssl_certfile is None:
                assert probe["grpc"] == {"port": ports["grpc"]}
            else:  # the kubelet's own probes have no TLS
                command = probe["exec"]["command"]
                asked = tyro.cli(Healthcheck, args=command[2:])
                assert (command[:2], asked.address) == (["outrider", "healthcheck"], f"127.0.0.1:{ports['grpc']}")
                assert asked.service_ssl_certfile == config.ssl_certfile
                assert asked.timeout < probe["timeoutSeconds"]
        startup, liveness, _ = probes
        assert (
            startup["periodSeconds"] * startup["failureThreshold"]
            >= settings_of(values, component)["startup"]["seconds"]
        )
        assert liveness["periodSeconds"] * liveness["failureThreshold"] == 60  # as `outrider serve` does


@every_chart
def test_processes_have_time_to_drain(values):
    for component, node, template in templates(values):
        config, container = config_of(component, node, template), container_of(template)
        grace = template["spec"]["terminationGracePeriodSeconds"]
        before = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
        drain = getattr(config, "drain_timeout", 5)
        if node:  # it computes for its leader until that one has drained
            assert (before, grace >= before + 10) == (drain, True)
            continue
        assert grace >= before + drain + 10
        assert (before > 0) is (component == "gateway")  # a service's gateways learn of its stop from itself
    if "gateway" in workloads(values):
        strategy = workloads(values)["gateway"]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def test_accelerators_bring_resources_nodes_and_devices():
    pods = {
        values: {component: one["spec"] for component, node, one in templates(values) if not node} for values in VALUES
    }
    for values, component, resource, count, device in (
        ("gpus", "target", "nvidia.com/gpu", 1, "cuda"),
        ("gpus", "draft", "nvidia.com/gpu", 1, "cuda"),
        ("multinode", "target", "nvidia.com/gpu", 8, "cuda"),
        ("multinode", "draft", "nvidia.com/gpu", 2, "cuda"),
        ("tpu", "draft", "google.com/tpu", 4, "tpu"),
    ):
        pod = pods[values][component]
        resources = pod["containers"][0]["resources"]
        assert resources["limits"][resource] == resources["requests"][resource] == count
        assert "cpu" not in resources["limits"]
        assert resources["limits"]["memory"] != resources["requests"]["memory"]
        assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
        config = config_of(component, 0, {"spec": pod})
        assert (config.device if component == "target" else config.draft_device) == device
    assert pods["tpu"]["draft"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice", "cloud.google.com/gke-tpu-topology": "2x2",
    }  # fmt: skip
    assert pods["gpus"]["target"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    for component in ("target", "draft"):
        pod = pods["default"][component]
        assert not {"nodeSelector", "tolerations"} & pod.keys()
        assert pod["containers"][0]["resources"]["limits"].keys() == {"memory"}
    shared = [v for v in pods["multinode"]["target"]["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert [one["name"] for one in shared] == ["shm"]
