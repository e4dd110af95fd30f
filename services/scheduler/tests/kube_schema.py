"""Checks manifests without a server: core kinds by the official client's models, custom ones by schemas of our own.

The models of the client (36) take any key and any type; here every key has to be known to its model and every value has
to be of the type that the model declares. The schemas list what JobSet v1alpha2, LeaderWorkerSet v1 and ComputeDomain
v1beta1 document, as far as we write it; pod templates inside them are checked by the models again.
"""

import re
from typing import Any

import jsonschema
from kubernetes.aio.client import models

_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str, "object": object}
_NAME = {"type": "string", "pattern": r"^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}


def _closed(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = _closed(
    ("name", "namespace", "labels"),
    name=_NAME,
    namespace=_NAME,
    labels=_STRINGS,
    annotations=_STRINGS,
    ownerReferences={
        "type": "array",
        "items": _closed(
            ("apiVersion", "kind", "name", "uid"),
            apiVersion={"type": "string"},
            kind={"type": "string"},
            name={"type": "string"},
            uid={"type": "string"},
        ),
    },
)
_COUNT = {"type": "integer", "minimum": 0}
_JOB_TEMPLATE = _closed(("spec",), metadata=_closed((), annotations=_STRINGS, labels=_STRINGS), spec={"type": "object"})
SCHEMAS = {
    "jobset.x-k8s.io/v1alpha2/JobSet": _closed(
        ("replicatedJobs",),
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=_COUNT,
        failurePolicy=_closed((), maxRestarts=_COUNT),
        network=_closed((), enableDNSHostnames={"type": "boolean"}),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _closed(("name", "template"), name=_NAME, replicas=_COUNT, template=_JOB_TEMPLATE),
        },
    ),
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet": _closed(
        ("leaderWorkerTemplate",),
        replicas=_COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=_closed(
            ("workerTemplate", "size"),
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            workerTemplate={"type": "object"},
        ),
    ),
    "resource.nvidia.com/v1beta1/ComputeDomain": _closed(
        ("numNodes", "channel"),
        numNodes=_COUNT,
        channel=_closed(("resourceClaimTemplate",), resourceClaimTemplate=_closed(("name",), name=_NAME)),
    ),
}


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError or jsonschema.ValidationError for anything that an API server would refuse or drop."""
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    if kind not in SCHEMAS:
        version = manifest["apiVersion"].rpartition("/")[2].capitalize()
        check_model(manifest, f"{version}{manifest['kind']}", manifest["kind"])
        return
    whole = _closed(
        ("apiVersion", "kind", "metadata", "spec"), apiVersion={}, kind={}, metadata=_METADATA, spec=SCHEMAS[kind]
    )
    jsonschema.validate(manifest, whole)
    spec = manifest["spec"]
    for job in spec.get("replicatedJobs", ()):
        check_model(job["template"]["spec"], "V1JobSpec", job["name"])
        _check_pod_names(manifest["metadata"]["name"], job)
        check_pod(job["template"]["spec"]["template"])
    if "leaderWorkerTemplate" in spec:
        check_model(spec["leaderWorkerTemplate"]["workerTemplate"], "V1PodTemplateSpec", "workerTemplate")
        check_pod(spec["leaderWorkerTemplate"]["workerTemplate"])


def check_model(value: Any, kind: str, where: str) -> None:
    """Every key known, every value of the declared type, every required key there."""
    listed = re.fullmatch(r"list\[(.*)\]", kind)
    mapped = re.fullmatch(r"dict\(str, (.*)\)|dict\[str, (.*)\]", kind)
    if listed:
        _require(isinstance(value, list), f"{where} is no list: {value!r}")
        for index, each in enumerate(value):
            check_model(each, listed[1], f"{where}[{index}]")
    elif mapped:
        _require(isinstance(value, dict), f"{where} is no mapping: {value!r}")
        for key, each in value.items():
            check_model(each, mapped[1] or mapped[2], f"{where}.{key}")
    elif kind in _PLAIN:
        plain = isinstance(value, _PLAIN[kind]) and (kind in ("bool", "object") or not isinstance(value, bool))
        _require(plain, f"{where} is no {kind}: {value!r}")
    else:
        _check_object(value, getattr(models, kind), where)


def _check_object(value: Any, model: Any, where: str) -> None:
    _require(isinstance(value, dict), f"{where} is no object: {value!r}")
    fields = {key: field for field, key in model.attribute_map.items()}
    for key, each in value.items():
        _require(key in fields, f"{where}: {model.__name__} has no {key}")
        check_model(each, model.openapi_types[fields[key]], f"{where}.{key}")
    # Required fields raise in the constructor.
    model(**{fields[key]: each for key, each in value.items()})


def check_pod(template: dict[str, Any]) -> None:
    """References inside a pod: volumes, claims, environment variables that are used before they are set."""
    spec = template["spec"]
    volumes = {each["name"] for each in spec.get("volumes", ())}
    claims = {each["name"] for each in spec.get("resourceClaims", ())}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", ()):
            _require(mount["name"] in volumes, f"volume {mount['name']} is not there")
        for claim in (container.get("resources") or {}).get("claims", ()):
            _require(claim["name"] in claims, f"claim {claim['name']} is not there")
        known: set[str] = set()
        for each in container.get("env", ()):
            used = set(re.findall(r"\$\((\w+)\)", each.get("value", "")))
            _require(used <= known, f"{each['name']} uses {used - known} before it is set")
            known.add(each["name"])
    for key, value in template["metadata"]["labels"].items():
        legal = re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", value)
        _require(legal is not None, f"label {key}={value!r}")


def _check_pod_names(jobset: str, job: dict[str, Any]) -> None:
    longest = f"{jobset}-{job['name']}-{job['replicas'] - 1}-{job['template']['spec']['completions'] - 1}-abcde"
    _require(len(longest) <= 63, f"pod name {longest} is too long")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
