"""The Kubernetes manifests: what a container may do, who reaches it, and what it needs to start."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from outrider.config import DraftConfig, GatewayConfig, TargetConfig, parse_flags

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = [one for name in KUSTOMIZATION["resources"] for one in yaml.safe_load_all((FOLDER / name).read_text())]
CONFIGS = {"target": TargetConfig, "draft": DraftConfig, "gateway": GatewayConfig}


def named(kind):
    return {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == kind}


def pod_of(name):
    spec = named("Deployment")[name]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def image_of(name):
    return (ROOT / "docker" / f"{name}.Dockerfile").read_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_containers_are_confined(name):
    pod, container = pod_of(name)
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert f"--uid {user['runAsUser']} outrider" in image_of(name)
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "memory" in container["resources"]["limits"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(volume.keys() & {"secret", "emptyDir"} for volume in pod["volumes"])


@pytest.mark.parametrize("name", CONFIGS)
def test_all_processes_have_the_token_and_flags_that_exist(name):
    pod, container = pod_of(name)
    config = parse_flags(CONFIGS[name], container["args"], f"outrider {name}")
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    secret = next(one["secret"] for one in pod["volumes"] if one["name"] == "token")
    (made,) = (one for one in KUSTOMIZATION["secretGenerator"] if one["name"] == secret["secretName"])
    assert config.service_token_file == f"{mounts['token']['mountPath']}/{made['files'][0]}"
    assert mounts["token"]["readOnly"] is True
    assert secret["defaultMode"] == 0o440
    assert "--allow-unauthenticated" not in container["args"]


def test_the_gateway_has_keys_and_nothing_secret_is_in_the_repository():
    _, container = pod_of("gateway")
    (source,) = container["envFrom"]
    (made,) = (one for one in KUSTOMIZATION["secretGenerator"] if one["name"] == source["secretRef"]["name"])
    ignored = (ROOT / ".gitignore").read_text().split()
    for file in (*made["envs"], "token"):
        assert f"/deploy/kubernetes/{file}" in ignored


def test_only_gateways_reach_the_services_at_the_ports_of_their_images():
    services, policies = named("Service"), named("NetworkPolicy")
    _, gateway = pod_of("gateway")
    config = parse_flags(GatewayConfig, gateway["args"], "outrider gateway")
    for name, (address,) in (("target", config.target), ("draft", config.draft)):
        (port,) = services[name]["spec"]["ports"]
        assert address == f"{name}:{port['port']}"
        entrypoint = re.search(r"^ENTRYPOINT (.+)$", image_of(name), re.MULTILINE)[1]
        assert f"0.0.0.0:{port['port']}" in shlex.split(entrypoint.strip("[]").replace(",", " "))
        assert services[name]["spec"].get("type", "ClusterIP") == "ClusterIP"
    closed = policies["services"]["spec"]
    assert closed["podSelector"]["matchExpressions"][0]["values"] == ["target", "draft"]
    assert closed["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}], "ports": [{"port": "grpc"}]}
    ]


def test_every_object_and_image_is_that_of_a_process():
    assert set(named("Deployment")) == set(named("Service")) == set(CONFIGS)
    assert {one["name"] for one in KUSTOMIZATION["images"]} == {f"outrider-{name}" for name in CONFIGS}
    assert all(pod_of(name)[1]["image"] == f"outrider-{name}" for name in CONFIGS)
    assert all(one["newTag"] != "latest" for one in KUSTOMIZATION["images"])
