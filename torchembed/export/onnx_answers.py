"""Answers of onnxruntime, compared with those of PyTorch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchembed.export.graph_inputs import of_samples
from torchembed.export.traced_model import TracedModel
from torchembed.modules.dense_part.errors import DeployError

if TYPE_CHECKING:
    import onnxruntime

_NUM_ROUNDINGS = 84
"""Units of rounding that answers may differ by, of the weights' narrowest dtype: 1e-5 in
float32."""
_WORD = re.compile(r"[\w.]+")


def open_session(path: Path, line_of_node: Mapping[str, str]) -> "onnxruntime.InferenceSession":
    """A session of onnxruntime on the CPU.

    Args:
        line_of_node: the line of the model behind each node, by its name.

    Raises:
        DeployError: where onnxruntime does not take the file, as for an operator that it lacks.
    """
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        named = (line_of_node[word] for word in _WORD.findall(str(error)) if word in line_of_node)
        raise DeployError(
            "model must be made of operators that onnxruntime "
            f"{onnxruntime.__version__} has on the CPU, and one{next(named, '')} is none: {error}"
        ) from error


def check_answers(session: "onnxruntime.InferenceSession", traced: TracedModel) -> None:
    """Compare the answers of ``session`` with PyTorch's for the examples, one sample, more
    samples than there are examples, and samples whose jagged bags are empty.

    Raises:
        DeployError: where they differ.
    """
    forms, tensors = traced.inputs.forms, traced.inputs.tensors
    batch_size = traced.parts.recording.batch_size
    every = torch.arange(batch_size)
    tolerance = _tolerance(traced)
    if not traced.inputs.vectors:
        of_model = traced.parts.choice.outputs(traced.parts.recording.result)
        found = _answers(session, traced, tensors)
        _compare(found, of_model, tolerance, f"the {batch_size} examples")
    batches = {
        "the examples": tensors,
        "1 sample": of_samples(forms, tensors, every[:1]),
        f"{2 * batch_size + 1} samples": of_samples(
            forms, tensors, torch.cat([every, every, every[:1]])
        ),
        "samples without ids": _without_ids(traced),
    }
    for what, batch in batches.items():
        with torch.no_grad():
            expected = traced.graph(batch)
        _compare(_answers(session, traced, batch), expected, tolerance, what)


def _without_ids(traced: TracedModel) -> dict[str, Tensor]:
    """The examples with empty bags of jagged features."""
    changed = dict(traced.inputs.tensors)
    for form in traced.inputs.forms:
        if form.rows is not None:
            changed[form.name] = changed[form.name][:0]
            lengths = f"{form.rows}.lengths"
            changed[lengths] = torch.zeros_like(changed[lengths])
    return changed


def _answers(
    session: "onnxruntime.InferenceSession", traced: TracedModel, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    names = traced.output_names()
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in batch.items()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


def _tolerance(traced: TracedModel) -> float:
    dtypes = [p.dtype for p in traced.graph.parameters() if p.dtype.is_floating_point]
    return _NUM_ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (*dtypes, torch.float32))


def _compare(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    for name, right in expected.items():
        got, right = found[name], right.detach().cpu()
        largest = max(1.0, float(right.abs().nan_to_num().max())) if right.numel() else 1.0
        is_close = got.shape == right.shape and torch.allclose(
            got, right, rtol=0.0, atol=tolerance * largest, equal_nan=True
        )
        if not is_close:
            error = f"{(got - right).abs().max():.2g}" if got.shape == right.shape else "its shape"
            raise DeployError(
                f"model must be answered by onnxruntime as by PyTorch, and output {name} of {what} "
                f"differs by {error}; its forward may draw random numbers, or use the number of "
                "samples as a constant"
            )
