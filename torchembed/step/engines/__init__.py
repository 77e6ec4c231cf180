"""The engines that train batches, and the choice among them."""
