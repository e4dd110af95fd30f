"""ctypes view of libucp: contexts, workers, endpoints, memory handles and remote keys; just enough for one-sided GET.

Structures carry padding at their ends: UCX reads only the members named in the mask, and newer versions append members.
The package's tests passed with the wheels 1.19.0, 1.21.0 and 1.22.0 (pyproject.toml bounds the wheel) and with Debian's
1.13.1.
`ucs_status_t` is a packed enum of one byte, so every status is read as `c_int8`.
"""

import ctypes as C
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from reflux_transfer.errors import BackendUnavailable, TransferError

OK, IN_PROGRESS, ERR_BUSY = 0, 1, -15
FEATURE_RMA, FEATURE_WAKEUP = 1 << 1, 1 << 4
ERROR_MODE_NONE, ERROR_MODE_PEER = 0, 1
_THREAD_MODE_SERIALIZED = 1
_CLOSE_FORCE = 1
_OP_FLAGS, _OP_MEMH = 1 << 4, 1 << 8
_MAP_ALLOCATE = 1 << 1
FIRST_ERROR_POINTER = (1 << 64) - 100

ErrorHandler = C.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class _ContextParams(C.Structure):
    _fields_ = [
        ("mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("pad", C.c_byte * 128),
    ]


class _WorkerParams(C.Structure):
    _fields_ = [("mask", c_uint64), ("thread_mode", c_int), ("pad", C.c_byte * 256)]


class _EndpointParams(C.Structure):
    _fields_ = [
        ("mask", c_uint64),
        ("address", c_void_p),
        ("error_mode", c_int),
        ("error_handler", c_void_p),
        ("error_argument", c_void_p),
        ("pad", C.c_byte * 128),
    ]


class _MapParams(C.Structure):
    _fields_ = [
        ("mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("pad", C.c_byte * 92),
    ]


class _MemoryAttributes(C.Structure):
    _fields_ = [("mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("pad", C.c_byte * 96)]


class RequestParam(C.Structure):
    """`ucp_request_param_t`; all zero means a plain operation."""

    _fields_ = [
        ("mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("pad", C.c_byte * 64),
    ]

    @classmethod
    def with_memory(cls, memh: int) -> "RequestParam":
        """The local buffer belongs to a registered region: spares UCX the look-up."""
        return cls(mask=_OP_MEMH, memh=memh)

    @classmethod
    def forced_close(cls) -> "RequestParam":
        """Close without a flush; what is outstanding fails."""
        return cls(mask=_OP_FLAGS, flags=_CLOSE_FORCE)


class UcpError(TransferError, RuntimeError):
    """A negative ucs_status_t."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{text} ({status})")
        self.status = status


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ucp_get_version_string": (c_char_p, []),
    "ucs_status_string": (c_char_p, [c_int8]),
    "ucp_config_read": (c_int8, [c_char_p, c_char_p, c_void_p]),
    "ucp_config_modify": (c_int8, [c_void_p, c_char_p, c_char_p]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (c_int8, [c_uint, c_uint, c_void_p, c_void_p, c_void_p]),
    "ucp_cleanup": (None, [c_void_p]),
    "ucp_worker_create": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_worker_get_efd": (c_int8, [c_void_p, c_void_p]),
    "ucp_worker_arm": (c_int8, [c_void_p]),
    "ucp_ep_create": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, c_void_p]),
    "ucp_mem_map": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_mem_unmap": (c_int8, [c_void_p, c_void_p]),
    "ucp_mem_query": (c_int8, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int8, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int8, [c_void_p, c_char_p, c_void_p]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p]),
    "ucp_request_check_status": (c_int8, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}


def wheel_folder() -> Path | None:
    """Folder of the `libucx-cu12` wheel, None when it is not installed."""
    spec = importlib.util.find_spec("libucx")
    return Path(spec.origin).parent if spec and spec.origin else None


def library_path(configured: str) -> str:
    """Which libucp to load: the configured one, else the wheel's, else the system's."""
    if configured:
        return configured
    folder = wheel_folder()
    return str(folder / "lib" / "libucp.so.0") if folder else "libucp.so.0"


class Library:
    """libucp, loaded once per path."""

    def __init__(self, configured: str = "") -> None:
        # Read by UCX's constructors. Its crash handlers would replace Python's, its introspection thread serves nobody,
        # and its report of unused names is noise here.
        defaults = {"ERROR_SIGNALS": "", "VFS_ENABLE": "n", "WARN_UNUSED_ENV_VARS": "n", "LOG_LEVEL": "fatal"}
        for name, value in defaults.items():
            os.environ.setdefault(f"UCX_{name}", value)
        path = library_path(configured)
        try:
            self.calls = C.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.calls, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(
                f"libucp does not load from {path}: {error}; install libucx-cu12 or name one"
            ) from error
        self.path = path
        self.version = self.calls.ucp_get_version_string().decode()
        self.release = tuple(int(part) for part in self.version.split(".")[:2])
        """Major and minor number."""

    def status_text(self, status: int) -> str:
        """UCX's own words for a status."""
        return self.calls.ucs_status_string(status).decode()

    def check(self, status: int) -> None:
        """Raises `UcpError` for a negative status."""
        if status < 0:
            raise UcpError(status, self.status_text(status))

    @contextmanager
    def configured(self, options: dict[str, str]) -> Iterator[c_void_p]:
        """A `ucp_config_t` with UCX variables, named without their prefix. Raises `UcpError` where UCX refuses one."""
        config = c_void_p()
        self.check(self.calls.ucp_config_read(None, None, byref(config)))
        try:
            for name, value in options.items():
                self.check(self.calls.ucp_config_modify(config, name.encode(), value.encode()))
            yield config
        finally:
            self.calls.ucp_config_release(config)

    def open_context(self, options: dict[str, str]) -> int:
        """A context whose workers may live in different threads; `options` as in `configured`."""
        context = c_void_p()
        params = _ContextParams(mask=1 | 1 << 5, features=FEATURE_RMA | FEATURE_WAKEUP, mt_workers_shared=1)
        with self.configured(options) as config:
            self.check(self.calls.ucp_init_version(*self.release, byref(params), config, byref(context)))
        return _address(context)

    def open_worker(self, context: int) -> int:
        """A worker that one thread at a time may use."""
        worker = c_void_p()
        params = _WorkerParams(mask=1, thread_mode=_THREAD_MODE_SERIALIZED)
        self.check(self.calls.ucp_worker_create(context, byref(params), byref(worker)))
        return _address(worker)

    def worker_address(self, worker: int) -> bytes:
        """What a peer needs to connect."""
        pointer, length = c_void_p(), c_size_t()
        self.check(self.calls.ucp_worker_get_address(worker, byref(pointer), byref(length)))
        address = C.string_at(pointer, length.value)
        self.calls.ucp_worker_release_address(worker, pointer)
        return address

    def event_descriptor(self, worker: int) -> int:
        """Readable when an armed worker has something to progress."""
        descriptor = c_int()
        self.check(self.calls.ucp_worker_get_efd(worker, byref(descriptor)))
        return descriptor.value

    def connect(self, worker: int, address: bytes, error_mode: int, handler: Any) -> int:
        """An endpoint; `handler` (an `ErrorHandler`) must outlive it."""
        endpoint, buffer = c_void_p(), C.create_string_buffer(address, len(address))
        pointer = C.cast(handler, c_void_p)
        params = _EndpointParams(mask=7, address=C.addressof(buffer), error_mode=error_mode, error_handler=pointer)
        self.check(self.calls.ucp_ep_create(worker, byref(params), byref(endpoint)))
        return _address(endpoint)

    def map_memory(self, context: int, address: int, length: int) -> int:
        """Registers existing memory."""
        memh = c_void_p()
        self.check(
            self.calls.ucp_mem_map(context, byref(_MapParams(mask=3, address=address, length=length)), byref(memh))
        )
        return _address(memh)

    def allocate_memory(self, context: int, length: int) -> tuple[int, int]:
        """Memory of UCX's own, by the context's transports where they have some; its handle and address."""
        memh, found = c_void_p(), _MemoryAttributes(mask=1)
        params = _MapParams(mask=2 | 4, length=length, flags=_MAP_ALLOCATE)
        self.check(self.calls.ucp_mem_map(context, byref(params), byref(memh)))
        self.check(self.calls.ucp_mem_query(memh, byref(found)))
        return _address(memh), _address(c_void_p(found.address))

    def unmap_memory(self, context: int, memh: int) -> None:
        """Inverse of `map_memory` and `allocate_memory`."""
        self.check(self.calls.ucp_mem_unmap(context, memh))

    def pack_key(self, context: int, memh: int) -> bytes:
        """The remote key that lets a peer read the memory."""
        pointer, length = c_void_p(), c_size_t()
        self.check(self.calls.ucp_rkey_pack(context, memh, byref(pointer), byref(length)))
        key = C.string_at(pointer, length.value)
        self.calls.ucp_rkey_buffer_release(pointer)
        return key

    def unpack_key(self, endpoint: int, key: bytes) -> int:
        """A remote key for use on one endpoint."""
        handle = c_void_p()
        self.check(self.calls.ucp_ep_rkey_unpack(endpoint, key, byref(handle)))
        return _address(handle)

    def pending(self, request: int | None) -> bool:
        """Whether a call's result is a request to wait for. Raises `UcpError` when it is an error."""
        if request and request >= FIRST_ERROR_POINTER:
            self.check(request - (1 << 64))
        return bool(request)


def _address(pointer: c_void_p) -> int:
    assert pointer.value, "UCX reported success without a result"
    return pointer.value
