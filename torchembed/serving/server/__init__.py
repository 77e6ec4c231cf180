"""A whole server: stores, models, updates and protocols, as a configuration says."""

from torchembed.serving.server.server import Server

__all__ = ["Server"]
