"""Pulls a version in a thread while the worker goes on with its steps, and says how far it is. Free of vLLM."""

import contextlib
import logging
import os
import threading
from functools import partial
from typing import Any, Literal

from reflux_transfer.client import puller as transfer
from reflux_transfer.client.offer import Offer
from reflux_transfer.errors import ReadCancelled
from reflux_transfer.intake import Intake
from reflux_transfer.offers import OfferReader
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment
from reflux_weightplan.spec import SpecLayout

log = logging.getLogger(__name__)

State = Literal["idle", "pulling", "ready", "failed"]


class Puller:
    """Owns the intake of one worker and the thread that fills it. Called by the worker's thread only."""

    def __init__(self, layout: SpecLayout) -> None:
        settings = TransferEnvironment()  # a worker is vLLM's process: nobody else can hand it settings
        puller = transfer.Puller(opened=partial(open_backend, settings=settings), paths=PathBook(settings))
        self.intake = Intake(layout, puller)
        self._reader = OfferReader(layout)
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._status: dict[str, Any] = {"state": "idle", "epoch": 0}

    @property
    def layout(self) -> SpecLayout:
        """What offers are pulled into."""
        return self._reader.layout

    def start(self, text: str) -> None:
        """Begins to pull an offer (`offers.offer_to_json`); ends a pull that is under way first.

        Raises `ValueError`, `KeyError`, `TypeError` or `PlanRefused` for what is no offer, or none for this layout.
        """
        offer = self._reader.read(text)
        self.cancel()
        self._cancelled = threading.Event()
        self._status = {"state": "pulling", "epoch": offer.epoch}
        thread = threading.Thread(target=self._run, args=(offer, self._cancelled), name="reflux-pull", daemon=True)
        self._thread = thread
        thread.start()

    def status(self) -> dict[str, Any]:
        """`state` and `epoch`; when ready also bytes, seconds and fingerprint (hexadecimal), when failed the error."""
        return dict(self._status)

    def cancel(self) -> None:
        """Ends a pull and waits until its thread has noticed: two must never write into the buffer."""
        if self._thread:
            self._cancelled.set()
            self._thread.join()
            self._thread = None
        self._status = {"state": "idle", "epoch": 0}

    def taken(self, epoch: int) -> memoryview:
        """The verified bytes of an epoch. Raises `RuntimeError` when they are not there."""
        if (self._status["state"], self._status["epoch"]) != ("ready", epoch):
            raise RuntimeError(f"epoch {epoch} was not pulled: {self._status}")
        return self.intake.view

    def close(self) -> None:
        """Ends a pull and closes the transports."""
        self.cancel()
        self.intake.close()

    def _run(self, offer: Offer, cancelled: threading.Event) -> None:
        leave_the_workers_core()
        status: dict[str, Any]
        try:
            report = self.intake.pull(offer, cancelled.is_set)
        except ReadCancelled:
            status = {"state": "idle", "epoch": 0}
        except Exception as error:  # thread boundary: whatever it is, the publisher is told
            log.warning("cannot pull epoch %d: %s", offer.epoch, error)
            status = {"state": "failed", "epoch": offer.epoch, "error": f"{type(error).__name__}: {error}"}
        else:
            took = {"bytes": report.bytes, "slices": report.slices, "seconds": report.seconds}
            status = {"state": "ready", "epoch": offer.epoch, **took, "fingerprint": f"{report.fingerprint:016x}"}
        if not cancelled.is_set():
            self._status = status


def leave_the_workers_core() -> None:
    """Lets this thread run on every core: vLLM pins its worker to those of its OpenMP threads, and threads inherit."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
