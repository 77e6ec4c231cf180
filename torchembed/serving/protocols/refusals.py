"""Why a server turns a request away before a model sees it."""

from torchembed.serving.interface import InvalidRequestError


class TooLargeError(InvalidRequestError):
    """The request is larger than the server takes; the limits are the server's."""


class BusyError(RuntimeError):
    """The server has as many requests under way as it takes, or is about to end; ask again later or
    elsewhere."""


class UnauthorizedError(PermissionError):
    """The request does not carry the server's token."""


class UnsupportedError(NotImplementedError):
    """The request wants an extension of the protocol that this server does not have."""
