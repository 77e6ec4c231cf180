"""Dense layers of recommenders."""
