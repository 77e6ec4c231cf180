"""Models over an embedding bag collection, of clicks and of several tasks; and of histories, over
an item table."""

from torchembed.models.autoint import AutoInt
from torchembed.models.candidate_scores import CandidateScores
from torchembed.models.dcn import DCN
from torchembed.models.dcnv2 import DCNv2, DCNv2Structure
from torchembed.models.deepfm import DeepFM
from torchembed.models.din import DIN
from torchembed.models.dlrm import DLRM, DLRM_DCNv2, DLRMInteraction
from torchembed.models.dnn import DNN
from torchembed.models.factorization_machine import FactorizationMachine
from torchembed.models.histories import Histories
from torchembed.models.history_encoder import HistoryEncoder
from torchembed.models.hstu import HSTU
from torchembed.models.impressions import Impressions
from torchembed.models.in_batch_softmax import in_batch_softmax
from torchembed.models.logistic_regression import LogisticRegression
from torchembed.models.mmoe import MMoE
from torchembed.models.next_item import NextItem
from torchembed.models.ple import PLE
from torchembed.models.sampled_softmax import sampled_softmax
from torchembed.models.sasrec import SASRec
from torchembed.models.shared_bottom import SharedBottom
from torchembed.models.two_tower import TwoTower
from torchembed.models.wide_and_deep import WideAndDeep
from torchembed.models.xdeepfm import XDeepFM

__all__ = [
    "DCN",
    "DIN",
    "DLRM",
    "DNN",
    "HSTU",
    "PLE",
    "AutoInt",
    "CandidateScores",
    "DCNv2",
    "DCNv2Structure",
    "DLRMInteraction",
    "DLRM_DCNv2",
    "DeepFM",
    "FactorizationMachine",
    "Histories",
    "HistoryEncoder",
    "Impressions",
    "LogisticRegression",
    "MMoE",
    "NextItem",
    "SASRec",
    "SharedBottom",
    "TwoTower",
    "WideAndDeep",
    "XDeepFM",
    "in_batch_softmax",
    "sampled_softmax",
]
