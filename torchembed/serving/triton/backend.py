"""The part of a model that runs in Triton's Python processes."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchembed.serving.interface import InvalidRequestError, ServedModel


class RequestExecutor:
    """Answers what Triton's Python backend hands over, several requests at once where they fit.

    Args:
        arguments: those of the backend's ``initialize``.
        backend: the module ``triton_python_backend_utils``, which exists in Triton's processes
            alone.
    """

    def __init__(self, arguments: Mapping[str, str], backend: Any) -> None:
        config = json.loads(arguments["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        module, function = parameters["loader"].split(":")
        load = getattr(importlib.import_module(module), function)
        self._model: ServedModel = load(
            arguments["model_name"],
            arguments["model_version"],
            **json.loads(parameters["arguments"]),
        )
        self._backend = backend
        self._is_batched = config["max_batch_size"] > 0

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in their order."""
        # By DLPack in and out, since the backend neither makes nor reads arrays of NumPy 2 rightly.
        inputs = [
            {tensor.name(): torch.from_dlpack(tensor).numpy() for tensor in request.inputs()}
            for request in requests
        ]
        if self._is_batched and len(requests) > 1 and _fit_together(inputs):
            try:
                return self._answer_together(requests, inputs)
            except InvalidRequestError:
                pass  # each on its own then, so that one fails alone
        return [self._answer(request, own) for request, own in zip(requests, inputs, strict=True)]

    def close(self) -> None:
        """Let go of the model, and close it where it can be."""
        close = getattr(self._model, "close", None)
        del self._model
        if close is not None:
            close()

    def _answer(self, request: Any, inputs: dict[str, np.ndarray]) -> Any:
        try:
            outputs = self._model.answer(inputs, list(request.requested_output_names())).outputs
        except InvalidRequestError as error:
            reason = self._backend.TritonError(str(error), self._backend.TritonError.INVALID_ARG)
            return self._backend.InferenceResponse(error=reason)
        return self._response(outputs)

    def _answer_together(
        self, requests: Sequence[Any], inputs: Sequence[dict[str, np.ndarray]]
    ) -> list[Any]:
        wanted = [request.requested_output_names() for request in requests]
        together = {name: np.concatenate([own[name] for own in inputs]) for name in inputs[0]}
        outputs = self._model.answer(together, sorted(set().union(*wanted))).outputs
        ends = np.cumsum([len(next(iter(own.values()))) for own in inputs])
        divided = {name: np.split(array, ends[:-1]) for name, array in outputs.items()}
        return [
            self._response({name: divided[name][index] for name in names})
            for index, names in enumerate(wanted)
        ]

    def _response(self, outputs: Mapping[str, np.ndarray]) -> Any:
        return self._backend.InferenceResponse(
            [
                self._backend.Tensor.from_dlpack(name, torch.from_numpy(array).contiguous())
                for name, array in outputs.items()
            ]
        )


def _fit_together(inputs: Sequence[dict[str, np.ndarray]]) -> bool:
    forms = [{name: array.shape[1:] for name, array in own.items()} for own in inputs]
    return all(form == forms[0] for form in forms)
