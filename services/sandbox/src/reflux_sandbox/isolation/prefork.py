"""The default tier: children forked from warm parents into namespaces, a read-only tree, filters and limits."""

import asyncio
import os

from reflux_sandbox.isolation import landlock, syscalls
from reflux_sandbox.isolation.base import ChildLimits, Isolation, IsolationUnavailable, Tier, VerifierInfo, offered
from reflux_sandbox.isolation.cells import Cells
from reflux_sandbox.isolation.handle import ChildHandle
from reflux_sandbox.isolation.template import Template
from reflux_sandbox.isolation.zygote import ZygoteConfig


class PreforkIsolation(Isolation):
    """Owns the cells and one template per verifier family, and one without verifiers for text that a model wrote."""

    name = "prefork"
    tier = Tier.PREFORK

    def __init__(
        self,
        *,
        limits: ChildLimits,
        idle_target: int,
        most_children: int,
        output_bytes: int,
        graders: str,
        cache_folder: str,
        import_folders: tuple[str, ...] = (),
        only_families: tuple[str, ...] = (),
        warm_modules: tuple[str, ...] = ("numpy", "numpy.random"),
        in_user_namespace: bool | None = None,
    ) -> None:
        """`in_user_namespace` None: only without root, who gives each child a user id of its own instead.

        `idle_target` children of each template wait; at most `most_children` less that are at work.
        """
        self._idle_target = idle_target
        self._most = most_children
        self._output_bytes = output_bytes
        self._in_user_namespace = os.geteuid() != 0 if in_user_namespace is None else in_user_namespace
        self._config = ZygoteConfig(
            limits=limits,
            in_user_namespace=self._in_user_namespace,
            warm_modules=warm_modules,
            graders=graders,
            cache_folder=cache_folder,
            import_folders=import_folders,
            only_families=only_families,
        )
        self._cells = Cells(limits)
        self._templates: dict[str, Template] = {}
        self._verifiers: list[VerifierInfo] = []
        self._notes: list[str] = []

    @property
    def reasons(self) -> list[str]:
        user = "user namespace" if self._in_user_namespace else "own user id per child"
        abi = landlock.abi()
        fixed = [
            f"namespaces for processes, network, mounts, IPC and host name; {user}",
            "root is a read-only tree without host data; /box, /tmp and /dev/shm are private tmpfs",
            f"Landlock ABI {abi}: writes to private folders only" if abi else "no Landlock in this kernel",
            "seccomp allow-list; no exec for model-written code and plain verifiers; no sockets",
            self._cells.reason,
        ]
        return fixed + self._notes

    @property
    def verifiers(self) -> list[VerifierInfo]:
        return self._verifiers

    @property
    def idle_children(self) -> int:
        return sum(template.pool.idle for template in self._templates.values())

    @property
    def busy_children(self) -> int:
        return sum(template.pool.busy for template in self._templates.values())

    def warm_parent_pid(self, family: str = "") -> int:
        """Process id of the launcher of a family's warm parent."""
        return self._templates[family].pid

    def cgroup_procs(self, number: int) -> tuple[str, ...]:
        """`cgroup.procs` files of cell `number`; empty without cgroups."""
        return self._cells.procs(number)

    async def start(self) -> None:
        if not syscalls.supported():
            raise IsolationUnavailable(f"no system call table for {os.uname().machine}")
        self._cells.open()
        try:
            code = await self._add_template("", self._most)
            families = code.ready.families
            await asyncio.gather(*(self._add_template(family, self._idle_target) for family in families))
        except IsolationUnavailable:
            await self.close()
            raise
        rows = [row for template in self._templates.values() for row in template.ready.verifiers]
        self._verifiers, withheld = offered(rows, self.tier)
        notes = [note for template in self._templates.values() for note in template.ready.notes]
        self._notes = [*dict.fromkeys(notes), *withheld]

    async def _add_template(self, family: str, cells: int) -> Template:
        self._cells.add(cells)
        config = self._config.for_family(family)
        template = Template(config, self._cells, self._idle_target, self._most, self._output_bytes)
        self._templates[family] = template
        await template.start()
        return template

    async def acquire(self, family: str = "") -> ChildHandle:
        if (template := self._templates.get(family)) is None:
            raise LookupError(f"no template for the verifiers of {family!r}")
        return await template.pool.acquire()

    async def close(self) -> None:
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        self._cells.close()
