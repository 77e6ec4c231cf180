"""The state of a training run as a checkpoint holds it, and its way back into a run."""
