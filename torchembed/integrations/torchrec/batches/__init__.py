"""TorchRec's batches on their way to torchembed's pipeline."""
