import ctypes
import gc
import mmap
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from reflux_transfer import memory
from reflux_transfer.backends import ucp
from reflux_transfer.backends.ucx import UcxBackend, options_of
from reflux_transfer.backends.ucx_lanes import Connection
from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.settings import TransferSettings

PRINT_CONFIG = 1
SEGMENTS = TransferSettings(ucx_segments="on")


def printed_config(library: ucp.Library, options: dict[str, str]) -> str:
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    library.calls.ucp_config_print.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    with library.configured(options) as config:
        library.calls.ucp_config_print(config, stream, b"", PRINT_CONFIG)
    libc.fclose(stream)
    return (text.value or b"").decode()


def test_rails_and_devices_reach_the_context() -> None:
    settings = TransferSettings(ucx_rma_rails=3, ucx_rndv_rails=4, ucx_net_devices="lo,eth9")
    lines = printed_config(ucp.Library(), options_of(settings)).splitlines()
    for line in ("UCX_MAX_RMA_RAILS=3", "UCX_MAX_RNDV_RAILS=4", "UCX_NET_DEVICES=lo,eth9", "UCX_TLS=cma,tcp,self"):
        assert line in lines


def test_error_mode_peer_is_chosen_by_settings() -> None:
    for mode, watched in (("auto", True), ("peer", False)):
        backend = UcxBackend(TransferSettings(ucx_error_mode=mode))  # type: ignore[arg-type]
        remote = backend.open(backend.describe(backend.allocate(10)))
        assert (remote.resource.watch is not None) is watched
        backend.close()


def test_missing_library_says_what_would_help() -> None:
    with pytest.raises(BackendUnavailable, match="libucx-cu12"):
        UcxBackend(TransferSettings(ucx_library="/nonexistent/libucp.so.0"))


def test_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match="no_such"):
        UcxBackend(TransferSettings(ucx_transports="no_such"))


@pytest.mark.parametrize("step", ["map_memory", "worker_address", "event_descriptor"])
def test_a_start_that_fails_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # of earlier tests
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def fail(*_arguments: object) -> None:
        raise ucp.UcpError(-4, "no memory")

    UcxBackend().close()
    before = held()
    monkeypatch.setattr(ucp.Library, step, fail)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="no memory"):
            UcxBackend()
    assert held() == before


@pytest.mark.parametrize("chosen", ["any_range or killed_while", pytest.param("ucx", marks=pytest.mark.slow)])
def test_a_system_ucx_passes_the_same_suite(chosen: str) -> None:
    """In a process of its own: two libucp with one SONAME do not live together."""
    library = os.environ.get("REFLUX_TEST_UCX_LIBRARY") or find_library("ucp")
    if not library:
        pytest.skip("there is no system UCX (Debian: libucx0); REFLUX_TEST_UCX_LIBRARY may name one")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"ucx and ({chosen})"]
    environment = {**os.environ, "REFLUX_TRANSFER_UCX_LIBRARY": library}
    files = [str(here / "test_backends.py"), str(here / "test_backend_deaths.py")]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("setting", "huge", "mapped"), [("on", 0.0, True), ("auto", 1.0, True), ("auto", 0.5, False), ("off", 1.0, False)]
)
def test_memory_for_readers_is_mapped_by_readers_of_this_host(
    setting: str, huge: float, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "huge_share", lambda _address: huge)
    settings = TransferSettings(ucx_segments=setting)  # type: ignore[arg-type]
    backend, owner = UcxBackend(settings), UcxBackend(settings)
    source, local = owner.allocate(3_000_000, for_readers=True), backend.allocate(3_000_000)
    source.view[7] = 9
    remote = backend.open(owner.describe(source))
    assert remote.resource.attached is mapped
    backend.read(remote, 0, local, 0, 3_000_000, 30.0)
    assert local.view == source.view
    backend.close()
    owner.close()


def test_the_share_of_huge_pages_is_that_of_the_mapping_asked_for() -> None:
    """Whether memfds get them is up to this machine: the kernel's own counter is the reference."""
    before = Path("/proc/self/smaps_rollup").read_text()
    with mmap.mmap(-1, 8 << 20) as shared:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(shared))
        shared[:: mmap.PAGESIZE] = bytes(len(shared) // mmap.PAGESIZE)
        grown = pmd_kilobytes(Path("/proc/self/smaps_rollup").read_text()) - pmd_kilobytes(before)
        assert memory.huge_share(address) == pytest.approx(grown / 8192)
    assert memory.huge_share(address) == 0


def pmd_kilobytes(rollup: str) -> int:
    return int(rollup.split("ShmemPmdMapped:")[1].split()[0])


def test_a_segment_that_cannot_be_mapped_is_read_by_cma(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, owner = UcxBackend(SEGMENTS), UcxBackend(SEGMENTS)
    source, local = owner.allocate(100_000, for_readers=True), backend.allocate(100_000)
    source.view[7] = 9
    handle = owner.describe(source)
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "attach", refuse)
        remote = backend.open(handle)
    assert not remote.resource.attached
    backend.read(remote, 0, local, 0, 100_000, 30.0)
    assert local.view == source.view
    backend.close()
    owner.close()


def test_without_segments_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = UcxBackend(SEGMENTS)
    with monkeypatch.context() as patched:
        patched.setattr(ucp.Library, "allocate_memory", refuse)
        region = backend.allocate(1000, for_readers=True)
    remote = backend.open(backend.describe(region))
    assert not remote.resource.attached
    backend.close()


def test_a_segment_lives_as_long_as_its_last_view() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("ucx_shm")

    def cycle() -> None:
        backend = UcxBackend(SEGMENTS)
        region = backend.allocate(100_000, for_readers=True)
        backend.describe(region)
        view = region.view
        backend.close()
        del region, backend
        view[99_999] = 1  # the end of the process, if it were gone
        assert held()[1] >= 1

    cycle()
    before = held()
    for _ in range(3):
        cycle()
    assert held() == before


def refuse(*_arguments: object) -> None:
    raise ucp.UcpError(-17, "Shared memory error")


def test_a_ucx_that_cannot_lose_an_owner_gets_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, owner = UcxBackend(SEGMENTS), UcxBackend(SEGMENTS)
    for end in backend, owner:
        monkeypatch.setattr(end._library, "release", (1, 18))
    remote = backend.open(owner.describe(owner.allocate(100_000, for_readers=True)))
    assert not remote.resource.attached
    backend.close()
    owner.close()
