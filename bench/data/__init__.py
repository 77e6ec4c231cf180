"""Workloads: DLRM-DCNv2's sizes, batches of ids, the made click log; and how fast readers are."""
