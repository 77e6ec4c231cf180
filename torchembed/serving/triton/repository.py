"""Triton's model repositories: the folders that it reads models from."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchembed.serving.datatypes import datatype_of
from torchembed.serving.interface import ModelForm, TensorForm
from torchembed.serving.triton.text_form import Message, Symbol, text_form

_MODEL_SOURCE = '''\
"""Answers requests to Triton by torchembed; config.pbtxt says which model."""

import json
import sys

import triton_python_backend_utils as backend


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        sys.path[:0] = json.loads(parameters["python_path"]["string_value"])
        from torchembed.serving.triton.backend import RequestExecutor

        self.executor = RequestExecutor(args, backend)

    def execute(self, requests):
        return self.executor.execute(requests)

    def finalize(self):
        self.executor.close()
'''


@dataclass(frozen=True, kw_only=True)
class TritonOptions:
    """How Triton runs a model."""

    max_batch_size: int = 0
    """The most samples that Triton gathers from several requests into one execution. 0 for requests
    as they come, which models with jagged features need."""
    max_queue_delay_microseconds: int = 100
    """How long a request may wait for others."""
    num_instances: int = 1
    """Processes that answer, each of which loads the model for itself."""
    environment: Path | None = None
    """The virtual environment that has torchembed. None where Triton's own Python has it."""
    python_path: tuple[Path, ...] = ()
    """Folders to import from before that environment's."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch_size", 0),
            ("max_queue_delay_microseconds", 0),
            ("num_instances", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.environment is not None and not (self.environment / "bin" / "activate").is_file():
            raise ValueError(
                f"environment must be a virtual environment, and {self.environment} has no "
                "bin/activate"
            )


def write_triton_model(
    folder: Path,
    form: ModelForm,
    loader: str,
    arguments: Mapping[str, Any],
    options: TritonOptions | None = None,
) -> Path:
    """Write the model that ``form`` describes into a Triton model repository, atomically.

    Args:
        folder: the repository; made where there is none.
        form: its version must be a positive integer.
        loader: "module:function"; Triton's Python calls it as
            ``function(name, version, **arguments)`` for a :class:`ServedModel` of this form.
        arguments: of the loader, as JSON can hold them.
        options: how Triton runs it.

    Returns:
        The model's folder in the repository. One that was there is replaced.

    Raises:
        ValueError: where Triton cannot serve such a form, or not with these options.
    """
    options = options or TritonOptions()
    if not re.fullmatch(r"[1-9][0-9]*", form.version):
        raise ValueError(f"form.version must be a positive integer, got {form.version!r}")
    if not re.fullmatch(r"\w[\w.-]*", form.name):
        raise ValueError(f"form.name must be a name of letters, digits, _, . and -: {form.name!r}")
    module, _, function = loader.partition(":")
    if not module or not function.isidentifier():
        raise ValueError(f"loader must be 'module:function', got {loader!r}")
    config = text_form(_config(form, loader, arguments, options))
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / form.name
    # Triton takes folders whose name begins with a period for no models.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as beside:
        model = Path(beside) / form.name
        (model / form.version).mkdir(parents=True)
        (model / "config.pbtxt").write_text(config)
        (model / form.version / "model.py").write_text(_MODEL_SOURCE)
        if written.exists():
            shutil.move(written, Path(beside) / "before")
        model.rename(written)
    return written


def _config(
    form: ModelForm, loader: str, arguments: Mapping[str, Any], options: TritonOptions
) -> Message:
    is_batched = options.max_batch_size > 0
    if is_batched:
        _check_batches(form)
    parameters = {
        "loader": loader,
        "arguments": json.dumps(dict(arguments)),
        "python_path": json.dumps([str(path.resolve()) for path in options.python_path]),
    }
    if options.environment is not None:
        parameters["EXECUTION_ENV_PATH"] = str(options.environment.absolute())
    config: dict[str, Any] = {
        "name": form.name,
        "backend": "python",
        "max_batch_size": options.max_batch_size,
        "version_policy": {"specific": {"versions": [int(form.version)]}},
        "input": _tensors(form.inputs, is_batched),
        "output": _tensors(form.outputs, is_batched),
        # Where tensors live is the model's affair; Triton hands them over in host memory.
        "instance_group": [{"kind": Symbol("KIND_CPU"), "count": options.num_instances}],
        "parameters": [
            {"key": key, "value": {"string_value": value}} for key, value in parameters.items()
        ],
    }
    if is_batched:
        delay = options.max_queue_delay_microseconds
        config["dynamic_batching"] = {"max_queue_delay_microseconds": delay}
    return config


def _tensors(forms: Sequence[TensorForm], is_batched: bool) -> list[Message]:
    messages: list[Message] = []
    for form in forms:
        if form.dtype.kind not in "biuf":
            raise ValueError(
                f"{form.name} must be of numbers or booleans to be served by Triton, "
                f"got {form.dtype}"
            )
        message: dict[str, Any] = {
            "name": form.name,
            "data_type": Symbol(f"TYPE_{datatype_of(form.dtype)}"),
        }
        dims = form.shape[1:] if is_batched else form.shape
        message["dims"] = dims or (1,)
        if not dims:  # Triton has no tensors without dimensions
            message["reshape"] = {"shape": ()}
        messages.append(message)
    return messages


def _check_batches(form: ModelForm) -> None:
    for tensor in (*form.inputs, *form.outputs):
        if tensor.name.endswith(".lengths") or tensor.shape[:1] != (-1,):
            raise ValueError(
                f"max_batch_size must be 0, since {tensor.name} is not of one row for each sample: "
                "Triton can gather no requests of such models"
            )
