"""The part of NIXL that the `nixl` backend uses: one agent, what it has registered, whom it has met, transfers."""

import importlib
import os
import threading
import uuid
from collections import Counter
from typing import Any

from reflux_transfer.errors import BackendUnavailable, PeerGone, TransferError, WrongHandle

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_PLUGIN = "UCX"


class Agent:
    """A NIXL agent. Calls are serialised: NIXL's own locking covers transfers, not the list of agents."""

    def __init__(self, net_devices: str) -> None:
        """`net_devices` becomes UCX_NET_DEVICES of NIXL's UCX; empty takes all. Raises `BackendUnavailable`."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read when the module loads
        api = _load()
        self._errors = tuple(
            kind for name, kind in vars(api.nixlBind).items() if name.startswith("nixl") and name.endswith("Error")
        )
        self._met: Counter[str] = Counter()
        self._lock = threading.RLock()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=True, backends=[], sync_mode=sync)
        self.name = f"reflux-{uuid.uuid4()}"
        try:
            self._agent = api.nixl_agent(self.name, config)
            options = self._agent.get_plugin_params(_PLUGIN)
            if net_devices:
                options["engine_config"] = f"NET_DEVICES={net_devices}"
            self._agent.create_backend(_PLUGIN, options)
        except (*self._errors, RuntimeError, KeyError) as error:
            raise BackendUnavailable(f"NIXL does not start with its {_PLUGIN} plug-in: {error}") from error

    def register(self, address: int, length: int) -> Any:
        """NIXL's descriptor of the memory."""
        with self._lock:
            try:
                return self._agent.register_memory([(address, length, 0, "")], "DRAM", [_PLUGIN])
            except self._errors as error:
                raise TransferError(f"NIXL refuses {length} bytes at {address:#x}: {error}") from error

    def unregister(self, registered: Any) -> None:
        """Inverse of `register`."""
        with self._lock:
            self._agent.deregister_memory(registered, [_PLUGIN])

    def describe(self, places: list[tuple[int, int]]) -> bytes:
        """What another agent needs to read this registered memory, given as (address, length), and no other."""
        with self._lock:
            registered = self._agent.get_reg_descs([(*place, 0, "") for place in places], "DRAM")
            return self._agent.get_partial_agent_metadata(registered, True, [_PLUGIN])

    def meet(self, name: str, metadata: bytes) -> None:
        """Learns of another agent's region; pair it with `part`. Raises `WrongHandle`."""
        with self._lock:
            if name != self.name:
                try:
                    found = self._agent.add_remote_agent(metadata)
                except (*self._errors, RuntimeError) as error:
                    raise WrongHandle(f"NIXL does not understand the handle: {error}") from error
                found = found.decode() if isinstance(found, bytes) else found
                if found != name:
                    if not self._met[found]:
                        self._agent.remove_remote_agent(found)
                    raise WrongHandle(f"the handle names agent {name} and describes {found}")
            self._met[name] += 1

    def part(self, name: str) -> None:
        """Ends the use of one region; the last one disconnects."""
        with self._lock:
            self._met[name] -= 1
            if self._met[name] > 0:
                return
            del self._met[name]
            if name != self.name:
                try:
                    self._agent.remove_remote_agent(name)
                except self._errors:
                    return  # it has disconnected by itself

    def start_read(self, name: str, ours: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]) -> "Transfer":
        """Begins to read `theirs` into `ours`, lists of (address, length, 0). Raises `PeerGone`."""
        with self._lock:
            try:
                local, remote = (self._agent.get_xfer_descs(side, "DRAM") for side in (ours, theirs))
                return Transfer(self._agent, self._agent.initialize_xfer("READ", local, remote, name), self._errors)
            except self._errors as error:
                raise PeerGone(f"no NIXL path to the region's owner: {error}") from error

    def close(self) -> None:
        """Ends the agent with its threads."""
        del self._agent


class Transfer:
    """A READ that has been posted."""

    def __init__(self, agent: Any, handle: Any, errors: tuple[type[Exception], ...]) -> None:
        self._agent, self._handle, self._errors = agent, handle, errors
        self._state = "PROC"
        self._posted = False

    def running(self) -> bool:
        """Posts it at the first call. False when it has ended well; raises `PeerGone` when it has failed."""
        try:
            self._state = self._agent.check_xfer_state(self._handle) if self._posted else self._post()
        except self._errors as error:
            self._state = "ERR"
            raise PeerGone(f"the region's owner does not answer: {error}") from error
        if self._state == "ERR":
            raise PeerGone("the region's owner does not answer: NIXL reports an error")
        return self._state == "PROC"

    def _post(self) -> str:
        self._posted = True
        return self._agent.transfer(self._handle)

    def end(self) -> bool:
        """Frees it, cancelling it if need be; False while NIXL cannot and may still write."""
        try:
            self._handle.release()
        except self._errors:
            return False
        return True


def _load() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise BackendUnavailable(f"{name} does not load: {error}") from error
    raise BackendUnavailable("NIXL is not installed: pip install 'reflux-transfer[nixl]'")
