"""Sequence models on MovieLens-1M: the next movie of each user, ranked among all."""
