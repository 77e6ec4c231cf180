"""torchembed's pipeline with the interface of TorchRec's."""
