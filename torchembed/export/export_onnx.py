"""``export_onnx``: a model, with or without its tables, as an ONNX file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from torchembed.core.ranks.collective_errors import decide_on_first_rank
from torchembed.export.missing_modules import check_installed
from torchembed.export.onnx_answers import check_answers, open_session
from torchembed.export.onnx_model import to_onnx
from torchembed.export.target import Target
from torchembed.export.traced_model import TracedModel, trace_model
from torchembed.modules.dense_part.source_lines import SourceLines

MAX_FILE_BYTES = 1 << 30
"""Weights of a graph up to which they are in its file; protocol buffers end at 2 GiB."""
_SMALL_BYTES = 128
"""Weights below this are always in the file."""


def export_onnx(
    model: nn.Module,
    examples: object,
    path: str | Path,
    *,
    with_tables: bool = True,
    output: str | Mapping[str, str] = "as_it_is",
    output_names: Sequence[str | None] | None = None,
    check: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write ``model`` as an ONNX file that onnxruntime answers from, for any number of samples.

    The graph takes what servers of torchembed take: dense inputs by name; of each feature its ids
    ``[B, hotness]``, or where bags are jagged ids ``[L]`` and ``<feature>.lengths``, int32 ``[B]``;
    and ``<feature>.weights``, float32, where its lookups are weighted. Ids have the dtype of the
    examples'. It gives float32 outputs by name. Bags are summed by gathering and scattering,
    without a loop over bags. Ids without a row do what they do in the model: where it raises,
    onnxruntime refuses the request on the CPU.

    The model runs once, in evaluation mode, and is left as it was. It may be sharded: then every
    rank calls with the same arguments but its own examples, of equal form, and rank 0 writes, for
    which it needs memory for all tables. Tables must not be dynamic, unless they are left out.

    Args:
        examples: arguments of ``forward``: a tuple for several; of at least 2 samples.
        path: of the file, or its URL, which fsspec knows. It must not be there yet.
        with_tables: False for the dense part alone, for servers with tables of their own: then
            ``<feature>.vectors`` is an input, ``[B, D]`` pooled, or the vector of each id. Where
            several tables look a feature up, it is ``<feature>.<table>.vectors``.
        output, output_names: as for :func:`torchembed.serving.models.deploy`.
        check: have onnxruntime answer for the examples, for one sample, for more samples and for
            bags without ids, and compare with PyTorch's answers.
        max_file_bytes: where all weights together have more bytes, they are written into
            ``<path>.data``, which must stay beside the file.

    Raises:
        DeployError: where the model cannot be exported, or onnxruntime lacks an operator or answers
            otherwise. The message says why, and names the line of the model where one is known.
        FileExistsError: where ``path`` is there.
        ImportError: where onnx, onnxscript or onnxruntime is not installed, or what a URL needs.
        OSError: where writing fails.
        ValueError: for a URL that fsspec does not know.
    """
    what = f"export the model to {path}"

    def begin() -> None:
        check_installed("export_onnx")
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
        target = Target(path)
        target.check_is_free(_data_file(target))

    decide_on_first_rank(begin, what)
    traced = trace_model(
        model,
        examples,
        with_tables=with_tables,
        output=output,
        output_names=output_names,
        device=torch.device("cpu"),
        what=what,
    )

    def write() -> None:
        assert traced is not None
        _write(traced, Target(path), max_file_bytes, check=check)

    decide_on_first_rank(write, what)


def _data_file(target: Target) -> str:
    return f"{target.name}.data"


def _write(traced: TracedModel, target: Target, max_file_bytes: int, *, check: bool) -> None:
    import onnx_ir

    lines = SourceLines(traced.parts.model)
    onnx_model = to_onnx(traced, lines)
    line_of_node = {
        node.name: lines.of_trace(node.metadata_props.get("pkg.torch.onnx.stack_trace"))
        for node in onnx_model.graph
        if node.name
    }
    for node in onnx_model.graph:
        # Paths of this machine, and what torch alone reads.
        node.metadata_props.clear()
    num_bytes = sum(parameter.nbytes for parameter in traced.graph.parameters())
    # In a folder of its own first, since the file names the one beside it.
    with target.folder_to_fill() as folder:
        onnx_ir.save(
            onnx_model,
            folder / target.name,
            external_data=_data_file(target) if num_bytes > max_file_bytes else None,
            size_threshold_bytes=_SMALL_BYTES,
        )
        if check:
            check_answers(open_session(folder / target.name, line_of_node), traced)
