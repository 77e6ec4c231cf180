"""The dense part of DLRM-DCNv2 alone: its layers' passes and its optimizers."""
