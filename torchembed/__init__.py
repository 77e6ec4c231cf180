"""Huge embedding tables for PyTorch: sharded over GPUs, looked up, pooled and updated in place."""
