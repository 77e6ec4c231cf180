"""Models for NVIDIA's Triton Inference Server, through its Python backend."""

from torchembed.serving.triton.repository import (
    TritonOptions,
    write_triton_model,
)

__all__ = ["TritonOptions", "write_triton_model"]
