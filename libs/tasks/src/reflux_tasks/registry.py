"""Finds tasks by name: a lab adds its own through the entry point group `reflux.tasks`."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from reflux_tasks.task import Task

GROUP = "reflux.tasks"


class UnknownTask(LookupError):
    """No installed distribution registers a task of this name; the message lists those that exist."""


def task_names() -> list[str]:
    """Names of the installed tasks, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def task_class(name: str) -> type[Task[Any]]:
    """Class of the task `name`; raises UnknownTask, or TypeError when the entry point is not a Task."""
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                loaded = entry.load()
            except ImportError as error:
                raise UnknownTask(
                    f"task {name!r} does not import ({error}); if it was installed after this process started, "
                    "start the stack again: reflux down, reflux up"
                ) from error
            if not (isinstance(loaded, type) and issubclass(loaded, Task)):
                raise TypeError(f"entry point {entry.value} of group {GROUP} is not a subclass of Task")
            return loaded
    raise UnknownTask(f"no task {name!r} in entry point group {GROUP}; installed: {', '.join(task_names()) or 'none'}")


def create_task(name: str, seed: int, cache_dir: Path, options: Mapping[str, Any] | None = None) -> Task[Any]:
    """Builds the task `name`; raises UnknownTask or InvalidOption. `cache_dir` is created when first written to."""
    return task_class(name).create(seed, cache_dir, options or {})
