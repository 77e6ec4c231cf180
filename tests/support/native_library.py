"""The C++ library's operations, and what they raise."""

import pytest
import torch
from torch.torch_version import TorchVersion

native = torch.ops.torchembed_native
CARRIES_MESSAGES = TorchVersion(torch.__version__) >= "2.13"
"""Built against torch 2.11, the library raises without saying why."""


def raises_runtime_error(message: str) -> pytest.RaisesExc[RuntimeError]:
    """Expects an error of the library, saying ``message`` where torch lets it."""
    return pytest.raises(RuntimeError, match=message if CARRIES_MESSAGES else None)
