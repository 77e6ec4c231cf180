"""``export_pt2``: a model, with or without its tables, as a package of AOTInductor."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from torchembed.core.ranks.collective_errors import decide_on_first_rank
from torchembed.export.pt2_model import SIGNATURE, signature_of
from torchembed.export.target import Target
from torchembed.export.torch_warnings import without_warnings_of_copies
from torchembed.export.traced_model import TracedModel, trace_model
from torchembed.modules.dense_part.errors import DeployError


def export_pt2(
    model: nn.Module,
    examples: object,
    path: str | Path,
    *,
    with_tables: bool = True,
    output: str | Mapping[str, str] = "as_it_is",
    output_names: Sequence[str | None] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Compile ``model`` by AOTInductor into a package that runs without Python's model, for any
    number of samples.

    It takes and gives what the file of :func:`export_onnx` does, as tensors on ``device``:
    :func:`load_pt2` loads it, and so do torch's own loaders in Python and C++, with a dictionary of
    the inputs in their order. Every weight may be replaced there, also those of one element, which
    AOTInductor otherwise compiles into the code. Ids without a row do what they do in the model:
    where it raises, a call raises on the CPU, and an assertion of the device fails on a GPU.

    Compiling takes a C++ compiler and a minute or more. A package for a GPU runs on GPUs of the
    generation of the one that it was compiled on. Otherwise as :func:`export_onnx`.

    Args:
        path: of the file, or its URL, which fsspec knows. It ends with ``.pt2``, and must not be
            there yet.
        device: where the package runs.

    Raises:
        DeployError: where the model cannot be exported or compiled; the message says why.
        FileExistsError: where ``path`` is there.
        ValueError: for a path that does not end with ``.pt2``, and a URL that fsspec does not know.
    """
    what = f"export the model to {path}"

    def begin() -> None:
        if not str(path).endswith(".pt2"):
            raise ValueError(f"path must end with .pt2, got {path}")
        Target(path).check_is_free()

    decide_on_first_rank(begin, what)
    traced = trace_model(
        model,
        examples,
        with_tables=with_tables,
        output=output,
        output_names=output_names,
        device=torch.device(device),
        what=what,
    )

    def write() -> None:
        assert traced is not None
        _write(traced, Target(path))

    decide_on_first_rank(write, what)


def _write(traced: TracedModel, target: Target) -> None:
    configs = {
        # Else constants of one element are compiled into the code, and cannot be replaced.
        "aot_inductor.use_runtime_constant_folding": True,
        "aot_inductor.metadata": {SIGNATURE: json.dumps(signature_of(traced))},
    }
    with target.folder_to_fill() as folder:
        try:
            with without_warnings_of_copies():
                torch._inductor.aoti_compile_and_package(
                    traced.program,
                    package_path=str(folder / target.name),
                    inductor_configs=configs,
                )
        except Exception as error:
            raise DeployError(
                f"model must be one that AOTInductor compiles, and is not: {error}"
            ) from error
