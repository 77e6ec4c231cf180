"""Models over an embedding bag collection: of clicks, and of several tasks."""

from torchembed.models.dcnv2 import DCNv2, DCNv2Structure
from torchembed.models.dlrm import DLRM, DLRM_DCNv2
from torchembed.models.mmoe import MMoE
from torchembed.models.ple import PLE
from torchembed.models.shared_bottom import SharedBottom

__all__ = ["DLRM", "PLE", "DCNv2", "DCNv2Structure", "DLRM_DCNv2", "MMoE", "SharedBottom"]
