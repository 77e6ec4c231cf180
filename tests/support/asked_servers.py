"""A model that servers of tests have, what they are asked, and what they are to answer."""

from typing import Any

import numpy as np
import torch

from tests.zoo.served_models import MODELS, ServedCase


def trained(seed: int) -> ServedCase:
    torch.manual_seed(seed)
    return MODELS["dlrm"]()


def expected(case: ServedCase, examples: Any) -> np.ndarray:
    with torch.no_grad():
        return case.model.eval()(*examples).numpy()


def asked(client: Any, protocol: Any, request: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """The output and the version of an answer of model ``m``."""
    names = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}
    inputs = []
    for name, array in request.items():
        tensor = protocol.InferInput(name, list(array.shape), names[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer = client.infer("m", inputs)
    response = answer.get_response()
    version = response["model_version"] if isinstance(response, dict) else response.model_version
    return answer.as_numpy("output"), version
