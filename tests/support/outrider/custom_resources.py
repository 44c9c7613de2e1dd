"""Structures of the chart's objects that are not Kubernetes' own, and the check of an object against them.

What the chart uses of LeaderWorkerSet (0.3 and newer), KEDA (2.7 and newer) and the Prometheus operator (0.39 and
newer), as their CustomResourceDefinitions state it. A field that is not listed is refused, so a new one in the chart is
looked up there first. With OUTRIDER_CRDS, a folder of those definitions (YAML files), objects are checked against them,
too.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]


_ANY, _TEXT, _FLAG, _LABELS = (
    {"type": "object"},
    {"type": "string"},
    {"type": "boolean"},
    {"type": "object", "additionalProperties": {"type": "string"}},
)


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _custom(group_version: str, kind: str, spec: Schema) -> Schema:
    one = {
        "apiVersion": {"const": group_version},
        "kind": {"const": kind},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    return _object(*one, **one)


def _whole(minimum: int) -> Schema:
    return {"type": "integer", "minimum": minimum}


# The controllers pass pod templates and "behavior" on as they are: Kubernetes' own schemas hold there.
USED: dict[str, Schema] = {
    "LeaderWorkerSet": _custom(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet",
        _object(
            "leaderWorkerTemplate",
            replicas=_whole(0),
            leaderWorkerTemplate=_object(
                "workerTemplate",
                size=_whole(1),
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
                leaderTemplate=_ANY,
                workerTemplate=_ANY,
            ),
        ),
    ),
    "ScaledObject": _custom(
        "keda.sh/v1alpha1", "ScaledObject",
        _object(
            "scaleTargetRef", "triggers",
            scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount=_whole(0),
            maxReplicaCount=_whole(1),
            advanced=_object(horizontalPodAutoscalerConfig=_object(behavior=_ANY)),
            triggers={
                "type": "array", "minItems": 1,
                "items": _object(
                    "type", "metadata",
                    type={"const": "prometheus"},
                    metricType={"enum": ["AverageValue", "Value"]},
                    # Of the trigger, not of the definition; all values are texts there.
                    metadata=_object(
                        "serverAddress", "query", "threshold",
                        serverAddress=_TEXT, query=_TEXT, threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                    ),
                ),
            },
        ),
    ),
    "ServiceMonitor": _custom(
        "monitoring.coreos.com/v1", "ServiceMonitor",
        _object(
            "endpoints", "selector",
            selector=_object(matchLabels=_LABELS),
            endpoints={
                "type": "array",
                "items": _object(
                    port=_TEXT,
                    path=_TEXT,
                    interval={"type": "string", "pattern": r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$"},
                    honorLabels=_FLAG,
                    scheme={"enum": ["http", "https"]},
                    tlsConfig=_object(insecureSkipVerify=_FLAG),
                ),
            },
        ),
    ),
}  # fmt: skip


def check(one: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError if an object is not as the definitions of its kind say."""
    import jsonschema

    kind = one["kind"]
    for schema in (USED[kind], published().get((one["apiVersion"], kind), {})):
        jsonschema.Draft202012Validator(schema).validate(one)


@functools.cache
def published() -> dict[tuple[str, str], Schema]:
    """Schemas of the definitions in the folder OUTRIDER_CRDS, by (apiVersion, kind); empty without one."""
    folder = os.environ.get("OUTRIDER_CRDS")
    found: dict[tuple[str, str], Schema] = {}
    for path in sorted(Path(folder).glob("*.yaml")) if folder else ():
        for one in yaml.safe_load_all(path.read_text()):
            if not one or one["kind"] != "CustomResourceDefinition":
                continue
            for version in one["spec"]["versions"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = _ANY
                found[f"{one['spec']['group']}/{version['name']}", one["spec"]["names"]["kind"]] = schema
    assert not folder or {kind for _, kind in found} >= USED.keys(), f"{folder} lacks definitions of {[*USED]}"
    return found


def _strict(schema: Any) -> Any:
    """The schema with objects that refuse fields it does not list, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {
        key: {name: _strict(one) for name, one in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out
