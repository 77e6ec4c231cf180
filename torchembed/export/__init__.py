"""Models as files for other runtimes: ONNX, and packages of AOTInductor."""

from torchembed.export.export_onnx import export_onnx
from torchembed.export.export_pt2 import export_pt2
from torchembed.export.graph_inputs import GraphInput
from torchembed.export.pt2_model import Pt2Model, load_pt2
from torchembed.modules.dense_part.errors import DeployError

__all__ = ["DeployError", "GraphInput", "Pt2Model", "export_onnx", "export_pt2", "load_pt2"]
