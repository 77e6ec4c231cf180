"""What a server says of itself and its models, as the protocol's JSON has it."""

from collections.abc import Mapping
from typing import Any

from torchembed import __version__
from torchembed.serving.datatypes import datatype_of
from torchembed.serving.interface import ModelDirectory, ModelForm, ModelState, TensorForm
from torchembed.serving.protocols.model_totals import ModelTotals

PLATFORM = "torchembed"
"""Of all models, in their metadata and configuration."""

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": PLATFORM, "version": __version__, "extensions": list(_EXTENSIONS)}


def model_metadata(directory: ModelDirectory, name: str, version: str | None) -> dict[str, Any]:
    """What a version of a model takes and gives, and which versions answer."""
    form = directory.model(name, version).form
    versions = directory.versions(name) if version is None else [form.version]
    return {
        "name": form.name,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": [_tensor(tensor) for tensor in form.inputs],
        "outputs": [_tensor(tensor) for tensor in form.outputs],
    }


def _tensor(tensor: TensorForm) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": datatype_of(tensor.dtype),
        "shape": list(tensor.shape),
    }


def model_config(directory: ModelDirectory, name: str, version: str | None) -> dict[str, Any]:
    """The configuration of a model in the form of Triton's; batches are a dim of shapes, so
    ``max_batch_size`` is 0."""
    form: ModelForm = directory.model(name, version).form
    return {
        "name": form.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [_configured(tensor) for tensor in form.inputs],
        "output": [_configured(tensor) for tensor in form.outputs],
    }


def _configured(tensor: TensorForm) -> dict[str, Any]:
    datatype = datatype_of(tensor.dtype)
    return {
        "name": tensor.name,
        "data_type": _CONFIG_TYPES.get(datatype, f"TYPE_{datatype}"),
        "dims": list(tensor.shape),
    }


def repository_index(directory: ModelDirectory, ready_only: bool) -> list[dict[str, Any]]:
    """All models in the folder, or those that answer."""
    return [
        {
            "name": entry.name,
            "version": entry.version,
            "state": entry.state.value,
            "reason": entry.reason,
        }
        for entry in directory.index()
        if not ready_only or entry.state is ModelState.READY
    ]


def statistics(
    directory: ModelDirectory,
    totals: Mapping[tuple[str, str], ModelTotals],
    name: str | None,
    version: str | None,
) -> dict[str, Any]:
    """Totals of the versions that answer: of all models, of one, or of one version. Of whole models
    those of other versions follow that have answered, as by dense parts that updates brought.

    Raises:
        UnknownModelError, ModelNotReadyError: where there is none that answers.
    """
    if name is None:
        wanted = [
            (entry.name, entry.version)
            for entry in directory.index()
            if entry.state is ModelState.READY
        ]
    elif version is None:
        wanted = [(name, each) for each in directory.versions(name)]
    else:
        wanted = [(name, directory.model(name, version).form.version)]
    if version is None:
        models = {model for model, _ in wanted}
        wanted += [key for key in totals if key[0] in models and key not in wanted]
    return {"model_stats": [_statistics(*key, totals.get(key) or ModelTotals()) for key in wanted]}


def _statistics(model: str, version: str, total: ModelTotals) -> dict[str, Any]:
    return {
        "name": model,
        "version": version,
        "last_inference": total.last_request_milliseconds,
        "inference_count": total.num_samples,
        "execution_count": total.num_executions,
        "inference_stats": {
            "success": _duration(total.num_succeeded, total.request_seconds),
            "fail": _duration(total.num_failed, total.failed_seconds),
            "queue": _duration(total.num_succeeded, total.queue_seconds),
            "compute_input": _duration(total.num_succeeded, total.input_seconds),
            "compute_infer": _duration(total.num_succeeded, total.infer_seconds),
            "compute_output": _duration(total.num_succeeded, total.output_seconds),
        },
        "batch_stats": [],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}
