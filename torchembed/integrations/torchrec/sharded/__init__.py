"""TorchRec's sharders, sharded collections, lookups and kernels over torchembed's tables."""
