"""Serving: lookups, protocols, and how soon updates are served."""
