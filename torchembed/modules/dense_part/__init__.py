"""Models taken apart into lookups in tables and a dense part, for servers and exporters."""
