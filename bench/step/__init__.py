"""A whole training step of DLRM-DCNv2: each system's, its stages, its profile and its picture."""
