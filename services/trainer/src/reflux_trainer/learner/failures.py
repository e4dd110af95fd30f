"""Errors of the libraries below the learner, as statuses that its caller can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

from reflux_kit import errors as kit
from reflux_model.errors import ModelFolderError, ParameterMismatchError, UnsupportedModelError
from reflux_storage import errors as storage
from reflux_trainer.learner.journal import OutOfOrderError
from reflux_trainer.learner.ranks.setup import RankLost
from reflux_trainer.learner.state import StateMismatchError
from reflux_transfer.client.publisher import PublishAborted, PublisherFenced, PublishRefused
from reflux_transfer.errors import ArenasBusy, BackendUnavailable

_STATUSES: tuple[tuple[type[Exception], type[kit.ServiceError]], ...] = (
    (OutOfOrderError, kit.WrongState),
    (ModelFolderError, kit.NotFound),
    (UnsupportedModelError, kit.InvalidRequest),
    (ParameterMismatchError, kit.InvalidRequest),
    (StateMismatchError, kit.WrongState),
    (storage.InvalidKey, kit.InvalidRequest),
    (storage.AlreadyExists, kit.AlreadyExists),
    (storage.NotFound, kit.NotFound),
    (storage.CorruptObject, kit.WrongState),
    (storage.StoreUnavailable, kit.Unavailable),
    (PublishAborted, kit.Conflict),
    (PublisherFenced, kit.WrongState),
    (PublishRefused, kit.WrongState),
    (ArenasBusy, kit.CapacityExhausted),
    (BackendUnavailable, kit.WrongState),
    (RankLost, kit.Unavailable),
)


@contextmanager
def as_service_errors() -> Iterator[None]:
    """Turns the known errors of the block into ServiceErrors with the same text."""
    try:
        yield
    except tuple(kind for kind, _ in _STATUSES) as error:
        status = next(status for kind, status in _STATUSES if isinstance(error, kind))
        raise status(str(error)) from error
