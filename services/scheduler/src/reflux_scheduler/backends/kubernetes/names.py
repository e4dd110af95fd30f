"""Owns how objects of a grant are called and labelled, and how amounts are written."""

import hashlib
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

GRANT_LABEL = "reflux.dev/grant"
JOB_LABEL = "reflux.dev/job"
GRANT_ANNOTATION = "reflux.dev/grant"
NODES_ANNOTATION = "reflux.dev/nodes"
DISPLAY_ANNOTATION = "reflux.dev/display-name"
DOMAIN_ANNOTATION = "reflux.dev/domain"
PARTS_ANNOTATION = "reflux.dev/workloads"
"""How many JobSets make the grant."""

GRANTED_ANNOTATION = "reflux.dev/granted"
"""Set once all agents were ready at one time; from then on a lost agent is a lost node, not a reason to wait."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object; group "" is the core."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As manifests write it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "") -> str:
        """URL path of the collection, or of one object of it."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{where}/{self.plural}" + (f"/{name}" if name else "")


NODE = Kind("", "v1", "nodes", "Node")
POD = Kind("", "v1", "pods", "Pod")
SECRET = Kind("", "v1", "secrets", "Secret")
JOBSET = Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
COMPUTE_DOMAIN = Kind("resource.nvidia.com", "v1beta1", "computedomains", "ComputeDomain")

MANAGER = "reflux-scheduler"
HOSTNAME = "kubernetes.io/hostname"
MAX_BASE = 40
"""Pods are called {base}-{group}-agent-0-{index}-{5 letters} and have to stay within 63."""

_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", re.ASCII)


def labels(stack: str) -> dict[str, str]:
    """Labels of everything that a stack makes."""
    return {
        "app.kubernetes.io/name": "reflux-agent",
        "app.kubernetes.io/instance": stack,
        "app.kubernetes.io/part-of": "reflux",
        "app.kubernetes.io/managed-by": MANAGER,
    }


def selector(stack: str) -> str:
    """Label selector of everything that a stack makes."""
    return f"app.kubernetes.io/managed-by={MANAGER},app.kubernetes.io/instance={stack}"


def base_name(stack: str, grant_id: str) -> str:
    """Name of a grant's objects: DNS label that begins with a letter, at most MAX_BASE long, unique per grant."""
    plain = f"{stack}-{grant_id}"
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
    if name == plain and len(name) <= MAX_BASE:
        return name
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{name[: MAX_BASE - 9].rstrip('-')}-{digest}"


def label_value(text: str) -> str:
    """A legal label value for any text: the text itself where it is one."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", text):
        return text
    return f"h{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def parse_quantity(text: str) -> Decimal:
    """An amount such as "4", "1500m", "8Gi" or "1e3". Raises ValueError."""
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity of Kubernetes")
    try:
        return Decimal(found[1]) * _UNITS[found[2]]
    except InvalidOperation:
        raise ValueError(f"{text!r} is no quantity of Kubernetes") from None
