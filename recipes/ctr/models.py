"""The models of clicks: what each adds to the configuration, and how it is built."""

import dataclasses
from typing import ClassVar, TypedDict

import torch
from torch import nn

from recipes.ctr.config import Collections, CtrConfig
from torchembed.models import (
    DCN,
    DLRM,
    DNN,
    AutoInt,
    DCNv2,
    DeepFM,
    DLRMInteraction,
    FactorizationMachine,
    LogisticRegression,
    WideAndDeep,
    XDeepFM,
)

_WEIGHTS = "_weight"
"""End of the names of tables with a weight for each id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegressionConfig(CtrConfig):
    """A weight for each id."""

    title: ClassVar[str] = "Logistic regression"

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return LogisticRegression(
            collections(1, _WEIGHTS), dense_in_features=num_dense, dense_device=device
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorizationMachineConfig(CtrConfig):
    """A weight for each id, and a product for each pair of features."""

    title: ClassVar[str] = "Factorization machine"

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return FactorizationMachine(
            collections(self.embedding_dim),
            collections(1, _WEIGHTS),
            dense_in_features=num_dense,
            dense_device=device,
        )


class _MLPArguments(TypedDict):
    layer_sizes: tuple[int, ...]
    dropout: float
    batch_norm: bool
    dense_in_features: int
    dense_device: torch.device


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(CtrConfig):
    """A model with an MLP."""

    layer_sizes: tuple[int, ...] = (256, 256)
    """Widths of the MLP."""
    dropout: float = 0.2
    batch_norm: bool = False

    def _of_mlp(self, num_dense: int, device: torch.device) -> _MLPArguments:
        """The arguments that models with an MLP have in common."""
        return {
            "layer_sizes": self.layer_sizes,
            "dropout": self.dropout,
            "batch_norm": self.batch_norm,
            "dense_in_features": num_dense,
            "dense_device": device,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DNNConfig(MLPConfig):
    """An MLP over embeddings."""

    title: ClassVar[str] = "DNN"

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return DNN(collections(self.embedding_dim), **self._of_mlp(num_dense, device))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideAndDeepConfig(MLPConfig):
    """A weight for each id beside an MLP."""

    title: ClassVar[str] = "Wide & Deep"

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return WideAndDeep(
            collections(self.embedding_dim),
            collections(1, _WEIGHTS),
            **self._of_mlp(num_dense, device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepFMConfig(MLPConfig):
    """A factorization machine beside an MLP."""

    title: ClassVar[str] = "DeepFM"

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return DeepFM(
            collections(self.embedding_dim),
            collections(1, _WEIGHTS),
            **self._of_mlp(num_dense, device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCNConfig(MLPConfig):
    """A cross network of vectors, parallel to an MLP."""

    title: ClassVar[str] = "DCN"
    num_cross_layers: int = 2

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return DCN(
            collections(self.embedding_dim),
            num_cross_layers=self.num_cross_layers,
            **self._of_mlp(num_dense, device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCNv2Config(MLPConfig):
    """A cross network of matrices, parallel to an MLP."""

    title: ClassVar[str] = "DCNv2"
    num_cross_layers: int = 2

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return DCNv2(
            collections(self.embedding_dim),
            num_cross_layers=self.num_cross_layers,
            **self._of_mlp(num_dense, device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig(MLPConfig):
    """Interactions of vectors under an MLP."""

    title: ClassVar[str] = "DLRM"
    dense_layer_sizes: tuple[int, ...] = (64,)
    """Widths of the MLP over dense features, where there are any, before the embedding's."""
    interaction: DLRMInteraction = DLRMInteraction.DOT

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return DLRM(
            collections(self.embedding_dim),
            num_dense,
            [*self.dense_layer_sizes, self.embedding_dim] if num_dense else [],
            [*self.layer_sizes, 1],
            device,
            interaction=self.interaction,
            dropout=self.dropout,
            batch_norm=self.batch_norm,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class XDeepFMConfig(MLPConfig):
    """A compressed interaction network and a weight for each id beside an MLP."""

    title: ClassVar[str] = "xDeepFM"
    cin_layer_sizes: tuple[int, ...] = (64,)
    """Numbers of vectors of the layers of the compressed interaction network."""

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return XDeepFM(
            collections(self.embedding_dim),
            collections(1, _WEIGHTS),
            cin_layer_sizes=self.cin_layer_sizes,
            **self._of_mlp(num_dense, device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoIntConfig(MLPConfig):
    """Self-attention between features beside an MLP."""

    title: ClassVar[str] = "AutoInt+"
    num_attention_layers: int = 3
    attention_dim: int = 64
    """Width of a feature's vector after each layer, of all heads together."""
    num_heads: int = 2

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        return AutoInt(
            collections(self.embedding_dim),
            num_attention_layers=self.num_attention_layers,
            attention_dim=self.attention_dim,
            num_heads=self.num_heads,
            **self._of_mlp(num_dense, device),
        )


MODELS: dict[str, type[CtrConfig]] = {
    "lr": LogisticRegressionConfig,
    "fm": FactorizationMachineConfig,
    "dnn": DNNConfig,
    "wide-and-deep": WideAndDeepConfig,
    "deepfm": DeepFMConfig,
    "dcn": DCNConfig,
    "dcnv2": DCNv2Config,
    "dlrm": DLRMConfig,
    "xdeepfm": XDeepFMConfig,
    "autoint": AutoIntConfig,
}
"""The configuration of each model by the first part of its recipes' names."""
