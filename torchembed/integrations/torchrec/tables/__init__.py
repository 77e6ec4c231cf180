"""torchembed's tables behind FBGEMM's interface, as TorchRec's kernels use them."""
