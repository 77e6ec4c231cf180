"""Models of clicks on small data sets, by the protocols of published benchmarks."""
