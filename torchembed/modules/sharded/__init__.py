"""Sharded collections, and what shards and plans the tables of a model."""
