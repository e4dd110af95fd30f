"""Whose runs are whose, and how many of them may be under way. What another tenant owns does not exist.

Operators and services have no tenant: they see all runs, and no quota binds them.
"""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from reflux_kit import auth
from reflux_kit.errors import CapacityExhausted, NotFound, PermissionDenied
from reflux_kit.keys import read_toml
from reflux_runs.config import RunConfig
from reflux_trainer.records import RunRecord


class Quota(BaseModel):
    """Bounds of what a tenant has under way; 0 sets none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_runs: int = Field(default=0, ge=0)
    """Runs that have not ended, paused ones included: they hold their processes."""

    max_engines: int = Field(default=0, ge=0)
    """Inference replicas of these runs together (`fleet.engines`)."""


class _TenantsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenants: Mapping[str, Quota] = {}


class Tenancy:
    """Owns the quotas. Pure but for `auth.tenant`, the caller of the moment."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        """`quotas` None: no file was named, and every tenant that has a token is unbounded."""
        self._quotas = quotas

    @property
    def caller(self) -> str:
        """Tenant of the call that is being served; "" is an operator."""
        return auth.tenant.get()

    def check_owner(self, record: RunRecord) -> RunRecord:
        """The record, if the caller may see it. Raises NotFound as for a run that is not there."""
        if self.caller and record.tenant != self.caller:
            raise NotFound(f"there is no run {record.run!r}; `reflux runs` lists them")
        return record

    def check_room(self, tenant: str, config: RunConfig, unfinished: Sequence[RunRecord]) -> None:
        """Raises CapacityExhausted when one more run of `config` goes beyond the quota, and names what holds it."""
        if not tenant or self._quotas is None:
            return
        quota = self._quotas.get(tenant)
        if quota is None:
            raise PermissionDenied(f"tenant {tenant!r} has no quota: REFLUX_TRAINER_TENANTS_FILE does not name it")
        own = [record for record in unfinished if record.tenant == tenant]
        engines = sum(_engines(each) for each in (config, *(record.config for record in own)))
        names = ", ".join(record.run for record in own[:10])
        for what, used, bound in (("runs", len(own) + 1, quota.max_runs), ("engines", engines, quota.max_engines)):
            if bound and used > bound:
                way = f"wait for or cancel one of {names}" if own else "take fewer fleet.engines"
                raise CapacityExhausted(
                    f"tenant {tenant!r} may have {bound} {what} under way, this would make {used}; {way}", tenant=tenant
                )


def _engines(config: RunConfig) -> int:
    """Replicas of the run's own; those of a shared fleet are the fleet's."""
    return 0 if config.fleet.shared else config.fleet.engines


def load_tenancy(path: str) -> Tenancy:
    """Reads a TOML file of `[tenants.NAME]` tables; an empty path gives no quotas. Raises StartupError."""
    if not path:
        return Tenancy()
    return Tenancy(read_toml(path, _TenantsFile, "tenants").tenants)
