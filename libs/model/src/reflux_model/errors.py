"""Errors about model folders and shapes; each names the file or the field and the way out."""


class ModelFolderError(FileNotFoundError):
    """A model folder is missing, incomplete or unreadable; `path` is the file or folder that is at fault."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class UnsupportedModelError(ValueError):
    """The folder is readable, but this package does not implement what its configuration asks for."""


class ParameterMismatchError(ValueError):
    """Named tensors do not fit the configuration: one is missing, superfluous, or of another shape."""
