"""The engines of a train step, and ``TrainPipeline``, which chooses among them."""
