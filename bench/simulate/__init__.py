"""A step of DLRM-DCNv2 on any number of GPUs, computed from the planner's costs."""
