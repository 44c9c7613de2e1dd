"""The Helm chart, rendered by Helm itself; what a release has; and a Kubernetes API that knows some Secrets."""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import http.server
import json
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from outrider.config import DraftConfig, GatewayConfig, TargetConfig, parse_flags

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "helm" / "outrider"
VALUES = sorted(path.name.removesuffix("-values.yaml") for path in (FOLDER / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "prod", "llm"
LEADER = "leaderworkerset.sigs.k8s.io/worker-index"  # label of pods; 0 is the leader's

Object = dict[str, Any]
_CONFIGS: dict[str, Any] = {"target": TargetConfig, "draft": DraftConfig, "gateway": GatewayConfig}


def values_of(name: str) -> dict[str, Any]:
    """A file of values."""
    return yaml.safe_load((FOLDER / "ci" / f"{name}-values.yaml").read_text()) or {}


def render(values: dict[str, Any]) -> list[Object]:
    """The objects of a release with these values. Raises Helm's errors."""
    import helm_python

    with helm_python.Chart.load(FOLDER) as chart:
        return _objects(chart.render(values, name=RELEASE, namespace=NAMESPACE))


@functools.cache
def rendered(name: str) -> list[Object]:
    """The objects of a release with a file of values."""
    return render(values_of(name))


def upgraded(secrets: dict[str, dict[str, str]]) -> list[Object]:
    """The objects of a release, with default values, in a cluster that has these Secrets."""
    import helm_python

    with (
        helm_python.Chart.load(FOLDER) as chart,
        _cluster(secrets) as url,
        helm_python.Config(namespace=NAMESPACE, kube_apiserver=url, kubeconfig_content=_KUBECONFIG) as config,
    ):
        return _objects(config.render(chart, {}, name=RELEASE, namespace=NAMESPACE, is_upgrade=True))


def _objects(manifests: dict[str, str]) -> list[Object]:
    texts = [text for name, text in sorted(manifests.items()) if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


# --- what a release has ---


def of_kind(objects: Iterable[Object], *kinds: str) -> dict[str, Object]:
    """Objects of these kinds, by component."""
    return {component_of(one): one for one in objects if one["kind"] in kinds}


def component_of(one: Object) -> str:
    """The component that an object belongs to: gateway, target or draft."""
    return str(one["metadata"]["labels"]["app.kubernetes.io/component"])


def workloads(values: str) -> dict[str, Object]:
    """What makes the pods, by component."""
    return of_kind(rendered(values), "Deployment", "StatefulSet", "LeaderWorkerSet")


def templates(values: str) -> Iterator[tuple[str, int, Object]]:
    """(component, node, pod template) of every pod that the workloads make; LeaderWorkerSet has two."""
    for component, one in workloads(values).items():
        if one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield from ((component, node, group[f"{part}Template"]) for node, part in enumerate(("leader", "worker")))
        else:
            yield component, 0, one["spec"]["template"]


def container_of(template: Object) -> Object:
    """The only container of a pod."""
    (container,) = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def selector_of(values: str, component: str) -> dict[str, str]:
    """Labels that all selectors of a component have."""
    selector = dict(of_kind(rendered(values), "Service")[component]["spec"]["selector"])
    selector.pop(LEADER, None)
    return selector


def settings_of(values: str, component: str) -> dict[str, Any]:
    """The values of a component, defaults included."""
    import helm_python

    with helm_python.Chart.load(FOLDER) as chart:
        return dict(chart.merge_values(values_of(values))[component])


# --- the processes in it ---


def image_of(component: str) -> str:
    """The Dockerfile of a component."""
    return (ROOT / "docker" / f"{component}.Dockerfile").read_text()


def config_of(component: str, node: int, template: Object) -> Any:
    """The configuration of a container's process. Raises ConfigError for wrong flags."""
    entrypoint = re.search(r"^ENTRYPOINT (.+)$", image_of(component), re.MULTILINE)
    assert entrypoint is not None
    words = [*ast.literal_eval(entrypoint[1])[2:], *container_of(template)["args"]]
    known = {"LWS_WORKER_INDEX": str(node), "LWS_LEADER_ADDRESS": f"{RELEASE}-0.{RELEASE}.{NAMESPACE}"}
    words = [re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], word) for word in words]
    return parse_flags(_CONFIGS[component], words, f"outrider {component}")


# --- a cluster ---


_KUBECONFIG = json.dumps(
    {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    }
)  # fmt: skip


@contextlib.contextmanager
def _cluster(secrets: dict[str, dict[str, str]]) -> Iterator[str]:
    """The URL of an API that has Secrets and nothing else."""
    resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    known: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
    }
    for name, data in secrets.items():
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        known[f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}"] = {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": encoded,
        }  # fmt: skip

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(known.get(path, missing)).encode()
            self.send_response(200 if path in known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
