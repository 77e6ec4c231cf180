"""Models over an embedding bag collection, of clicks and of several tasks; and of histories, over
an item table."""

from torchembed.models.dcnv2 import DCNv2, DCNv2Structure
from torchembed.models.dlrm import DLRM, DLRM_DCNv2
from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.models.hstu import HSTU
from torchembed.models.mmoe import MMoE
from torchembed.models.next_item import NextItem
from torchembed.models.ple import PLE
from torchembed.models.sampled_softmax import sampled_softmax
from torchembed.models.sasrec import SASRec
from torchembed.models.shared_bottom import SharedBottom

__all__ = [
    "DLRM",
    "HSTU",
    "PLE",
    "DCNv2",
    "DCNv2Structure",
    "DLRM_DCNv2",
    "Histories",
    "HistoryEncoder",
    "MMoE",
    "NextItem",
    "SASRec",
    "SharedBottom",
    "sampled_softmax",
]
