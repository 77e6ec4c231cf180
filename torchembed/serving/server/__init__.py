"""A whole server: stores, models, updates and protocols, as a configuration says."""

from torchembed.serving.server.command_line import add_flags, config_of
from torchembed.serving.server.memory_table import memory_table
from torchembed.serving.server.server import Server

__all__ = ["Server", "add_flags", "config_of", "memory_table"]
