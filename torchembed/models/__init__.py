"""Click models over an embedding bag collection."""

from torchembed.models.dcnv2 import DCNv2, DCNv2Structure
from torchembed.models.dlrm import DLRM, DLRM_DCNv2

__all__ = ["DLRM", "DCNv2", "DCNv2Structure", "DLRM_DCNv2"]
