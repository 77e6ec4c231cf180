"""Loading and unloading models at a client's request."""

from torchembed.serving.interface import InvalidRequestError, ModelDirectory
from torchembed.serving.protocols.refusals import UnsupportedError


def load(directory: ModelDirectory, name: str, parameters: set[str]) -> None:
    """Load the newest version of a model; returns when it answers.

    Raises:
        UnsupportedError: for parameters, which would replace what the folder says.
        UnknownModelError: where the folder has no such model.
        InvalidRequestError: where it cannot be loaded.
    """
    _refuse(parameters, "load")
    try:
        directory.load(name)
    except ValueError as error:
        raise InvalidRequestError(f"{name!r} cannot be loaded: {error}") from error


def unload(directory: ModelDirectory, name: str, parameters: set[str]) -> None:
    """Let go of all versions of a model.

    Raises:
        UnsupportedError: for parameters but ``unload_dependents``: no model here has dependents.
        UnknownModelError: where there is no such model.
    """
    _refuse(parameters - {"unload_dependents"}, "unload")
    directory.unload(name)


def _refuse(parameters: set[str], call: str) -> None:
    if parameters:
        raise UnsupportedError(
            f"{call} does not take parameters, got {', '.join(sorted(parameters))[:200]}; change "
            "the model's folder instead"
        )
