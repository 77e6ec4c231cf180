"""Models for NVIDIA's Triton Inference Server, through its Python backend."""

from torchembed.serving.triton.deployed import DeployedModel, write_triton_repository
from torchembed.serving.triton.repository import TritonOptions, write_triton_model

__all__ = ["DeployedModel", "TritonOptions", "write_triton_model", "write_triton_repository"]
