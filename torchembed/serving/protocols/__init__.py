"""The protocols by which a server is asked: the Open Inference Protocol over HTTP and gRPC."""

from torchembed.serving.protocols.ending import serve_until_signalled
from torchembed.serving.protocols.grpc_server import GrpcServer
from torchembed.serving.protocols.http_server import HttpServer
from torchembed.serving.protocols.metrics import (
    HistogramTotal,
    MetricKind,
    MetricTotal,
    ServerMetrics,
)
from torchembed.serving.protocols.model_totals import ExecutionTotals
from torchembed.serving.protocols.options import (
    ClientTimeouts,
    RequestLimits,
    ServerOptions,
    TlsFiles,
)

__all__ = [
    "ClientTimeouts",
    "ExecutionTotals",
    "GrpcServer",
    "HistogramTotal",
    "HttpServer",
    "MetricKind",
    "MetricTotal",
    "RequestLimits",
    "ServerMetrics",
    "ServerOptions",
    "TlsFiles",
    "serve_until_signalled",
]
