"""Loading, rolling back and unloading models at a client's request."""

import json
from collections.abc import Mapping
from typing import Any

from torchembed.serving.interface import InvalidRequestError, ModelDirectory
from torchembed.serving.protocols.refusals import UnsupportedError


def load(directory: ModelDirectory, name: str, parameters: Mapping[str, Any]) -> None:
    """Load a version of a model, or roll the model back; returns when it answers so.

    Args:
        parameters: of the call. ``roll_back``: true to answer as before the last load or swap of
            the dense part. ``config``: a model configuration of Triton as JSON, whose
            ``version_policy`` names the version to load. Without them the newest is loaded.

    Raises:
        UnsupportedError: for other parameters, which would replace what the folder says.
        UnknownModelError: where the folder has no such model or version.
        InvalidRequestError: for other values, and where the model cannot be loaded or rolled back.
    """
    _refuse(set(parameters) - {"roll_back", "config"}, "load", "roll_back and config")
    is_back = parameters.get("roll_back", False)
    if type(is_back) is not bool:
        raise InvalidRequestError(f"roll_back must be true or false, got {_shown(is_back)}")
    if is_back and "config" in parameters:
        raise InvalidRequestError(
            "load must have one of roll_back and config, got both; a configuration names the "
            "version itself"
        )
    version = _version_of(parameters["config"]) if "config" in parameters else None
    try:
        if is_back:
            directory.roll_back(name)
        else:
            directory.load(name, version)
    except ValueError as error:
        change = "rolled back" if is_back else "loaded"
        raise InvalidRequestError(f"{name!r} cannot be {change}: {error}") from error


def unload(directory: ModelDirectory, name: str, parameters: Mapping[str, Any]) -> None:
    """Let go of all versions of a model.

    Raises:
        UnsupportedError: for parameters but ``unload_dependents``: no model here has dependents.
        UnknownModelError: where there is no such model.
    """
    _refuse(set(parameters) - {"unload_dependents"}, "unload", "unload_dependents")
    directory.unload(name)


def _version_of(config: object) -> str:
    """The version that a configuration names.

    Raises:
        UnsupportedError: where it has other fields than ``version_policy``.
        InvalidRequestError: where that is not one version.
    """
    try:
        described = json.loads(config) if isinstance(config, str) else None
    except (ValueError, RecursionError):
        described = None
    if type(described) is not dict:
        raise InvalidRequestError(
            f"config must be a string that holds a JSON object, got {_shown(config)}"
        )
    _refuse(set(described) - {"version_policy"}, "config of load", "version_policy")
    match described:
        case {"version_policy": {"specific": {"versions": [version]}}} if type(version) in (
            int,
            str,
        ):
            return str(version)
    raise InvalidRequestError(
        'config must name one version: {"version_policy": {"specific": {"versions": [1]}}}, got '
        f"{_shown(config)}; for the newest leave config out"
    )


def _refuse(parameters: set[str], what: str, taken: str) -> None:
    if parameters:
        raise UnsupportedError(
            f"{what} takes {taken} alone, got {', '.join(sorted(parameters))[:200]}; for all else "
            "change the model's folder"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
