"""What a token of one run may do. Pure; tokens of the stack itself are not limited.

A run's processes hold such a token, and an operator may hand one out for one run's model. Requests say whom they
concern in a few fields of the same names everywhere; those that are filled must name the token's run (a run's model is
called like the run, its adapters `<run>/adapters/<name>`). Resources that are named without their run (replicas,
verifications, request ids) are protected by unguessable names only, and lists without a filter show all runs.
"""

from google.protobuf.message import Message

from reflux_kit.errors import PermissionDenied

ADAPTERS = "/adapters/"
"""Stands in a model's name between the run and what is an adapter of the run's model."""

_METHODS: dict[str, tuple[str, ...]] = {
    "SchedulerService": (),
    "AgentService": (),
    "TrainerService": ("RegisterLearner",),
}
"""Services that take nothing but these methods from a run's token."""

_TENANT_METHODS = frozenset(
    ("CreateRun", "GetRun", "ListRuns", "WatchRun", "PauseRun", "ResumeRun", "ForkRun", "CancelRun")
)

_RUN_FIELDS = ("run", "model_id")
_NESTED = ("replica", "traffic", "requests")
_NAME_PREFIXES = ("checkpoints/", "runs/")
"""Resource names whose second segment is a run."""

_FOR_ALL_WHEN_EMPTY = ("PauseFleet", "ResumeFleet", "Abort", "ClaimVerifications", "ListDeadLetters")
"""Methods that change, or lay open, every run when no field names one: runs may call their groups alike."""


def check(method: str, request: Message, run: str) -> None:
    """Raises `PermissionDenied` unless the call "/package.Service/Method" stays within `run`."""
    service, _, name = method.rpartition("/")
    allowed = _METHODS.get(service.rpartition(".")[2])
    if allowed is not None and name not in allowed:
        raise PermissionDenied(f"{name} needs an operator's token; this one is for the run {run!r} only", run=run)
    named = _runs(request)
    for path, value in named:
        check_run(value, run, path)
    if not named and name in _FOR_ALL_WHEN_EMPTY:
        raise PermissionDenied(f"{name} without a run or model concerns all; the token is for {run!r} only", run=run)


def check_tenant(method: str) -> None:
    """Raises `PermissionDenied` unless a tenant may make the call: the service looks whose run it concerns."""
    service, _, name = method.rpartition("/")
    if service.rpartition(".")[2] != "TrainerService" or name not in _TENANT_METHODS:
        raise PermissionDenied(f"{name} needs an operator's token; a tenant's opens the trainer's runs only")


def check_run(named: str, run: str, field: str) -> None:
    """Raises `PermissionDenied` when `field` names another run than the token's; HTTP doors call it themselves."""
    if named != run and not (field.endswith("model_id") and named.startswith(run + ADAPTERS)):
        raise PermissionDenied(f"{field} is {named[:100]!r}, but the token is for the run {run!r} only", run=run)


def run_of(model_id: str) -> str:
    """The run that a model belongs to."""
    return model_id.partition(ADAPTERS)[0]


def _runs(request: Message, prefix: str = "") -> list[tuple[str, str]]:
    """Every (field, run) that the request names."""
    found = []
    for field, value in request.ListFields():
        path = prefix + field.name
        if field.name in _RUN_FIELDS:
            found.append((path, value))
        elif field.name in _NESTED and field.message_type is not None:
            for each in [value] if isinstance(value, Message) else value:
                found += _runs(each, path + ".")
        elif field.name == "name" and value.startswith(_NAME_PREFIXES):
            found.append((path, value.split("/")[1]))
    return found
