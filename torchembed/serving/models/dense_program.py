"""The dense part of a model as a program of ``torch.export``, apart from its weights."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from torchembed.checkpoints.files.tensor_file import bytes_of, header_of, open_safetensors
from torchembed.serving.models.errors import ModelFolderError

PROGRAM_FILE = "dense.pt2"
WEIGHTS_FILE = "dense.safetensors"


class DenseWeights(NamedTuple):
    """The weights of a dense part, with the version that answers by them have."""

    tensors: tuple[Tensor, ...]
    version: str


class DenseProgram:
    """A function of weights, dense inputs and vectors of tables. Any number of threads may run
    it."""

    def __init__(self, program: ExportedProgram, device: torch.device) -> None:
        moved = move_to_device_pass(program, device)
        moved.graph_module.recompile()  # for the pass changes the graph alone
        constants: list[Tensor] = []
        for spec in moved.graph_signature.input_specs:
            if spec.target is not None:
                constant = moved.constants[spec.target]
                assert isinstance(constant, Tensor)
                constants.append(constant.to(device))
        self._run, self._constants = moved.graph_module, constants

    def run(self, weights: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, float32, of ``arguments`` behind ``weights``."""
        with torch.inference_mode():
            return self._run(*self._constants, *weights, *arguments)


def program_bytes(program: ExportedProgram) -> bytes:
    """The file of a program that has neither weights nor example inputs."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def load_program(path: Path) -> ExportedProgram:
    """The program that :func:`program_bytes` wrote, without unpickling anything.

    Raises:
        ModelFolderError: where the file is none, or holds something that would be unpickled.
    """
    content = path.read_bytes()
    try:
        _check_unpickled(content)
        return torch.export.load(io.BytesIO(content))
    except (
        zipfile.BadZipFile,
        AssertionError,
        AttributeError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelFolderError(
            f"{path} must be a program that deploy() wrote, and of a torch that this one "
            f"({torch.__version__}) reads: {error}"
        ) from error


def _check_unpickled(content: bytes) -> None:
    """Raise ``ValueError`` for a file in which ``torch.export.load`` would find pickles."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            is_tensor = name.startswith(("data/constants/tensor_", "data/weights/weight_"))
            if name.endswith("_config.json"):
                forms = json.loads(archive.read(entry))["config"].values()
                if any(form["use_pickle"] for form in forms):
                    raise ValueError(f"{entry.filename} names pickles")
            elif name.startswith("data/sample_inputs/"):
                if entry.file_size:
                    raise ValueError(f"{entry.filename} must be empty")
            elif not (folder and (is_tensor or name in _OTHERS)):
                raise ValueError(f"it holds {entry.filename}")


_OTHERS = (
    "models/model.json",
    "archive_format",
    "archive_version",
    "byteorder",
    "version",
    ".data/version",
    ".data/serialization_id",
)


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors into a safetensors file, in their order."""
    header = header_of({name: (tuple(w.shape), w.dtype) for name, w in weights.items()})
    with path.open("wb") as file:
        file.write(header)
        for weight in weights.values():
            file.write(bytes_of(weight.detach().cpu()))


def read_weights(path: Path, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """The tensors of ``names`` of a safetensors file, copied to ``device``.

    Raises:
        ModelFolderError: where the file is damaged, or has not exactly these.
    """
    try:
        found = open_safetensors(path)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} is corrupt, deploy again: {error}") from None
    if set(found) != set(names):
        raise ModelFolderError(
            f"{path} must hold the weights {sorted(names)}, got {sorted(found)}; deploy again"
        )
    return [found[name].to(device, copy=True) for name in names]
