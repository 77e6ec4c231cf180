"""Why a server turns a request away before a model sees it."""

from torchembed.serving.interface import InvalidRequestError


class TooLargeError(InvalidRequestError):
    """The request is larger than the server takes; the limits are the server's."""


class UnauthorizedError(PermissionError):
    """The request does not carry the server's token."""


class UnsupportedError(NotImplementedError):
    """The request wants an extension of the protocol that this server does not have."""


class EncodedBodyError(UnsupportedError):
    """The body is compressed, or encoded in another way."""


_MAX_CHARACTERS = 1000  # gRPC holds an error in 8 KiB of trailers


def shortened(error: Exception) -> str:
    """What an error says, at most 1000 characters of it: it may hold names of a client's making."""
    text = str(error)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
