"""Checkpoints in a folder or object store, and whole tables as safetensors."""
