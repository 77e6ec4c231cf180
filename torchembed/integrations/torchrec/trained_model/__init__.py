"""TorchRec's models as torchembed's pipeline trains them."""
