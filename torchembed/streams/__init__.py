"""Update messages: changed rows and dense parameters, from the trainer to servers."""

from torchembed.streams.brokers import BrokerOptions
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.message_sender import DeliveryError
from torchembed.streams.publisher_options import (
    MessageForm,
    PublisherOptions,
    PublisherStatistics,
)
from torchembed.streams.received_messages import Update, WidthOf
from torchembed.streams.source_options import Lag, SourceOptions, SourceStatistics
from torchembed.streams.update_publisher import UpdatePublisher
from torchembed.streams.update_source import UpdateSource
from torchembed.streams.updates import DenseUpdate, RowUpdate, UpdateOrigin

__all__ = [
    "BrokerOptions",
    "DeliveryError",
    "DenseUpdate",
    "Lag",
    "MessageError",
    "MessageFault",
    "MessageForm",
    "PublisherOptions",
    "PublisherStatistics",
    "RowUpdate",
    "SourceOptions",
    "SourceStatistics",
    "Update",
    "UpdateOrigin",
    "UpdatePublisher",
    "UpdateSource",
    "WidthOf",
]
