"""DCNv2 on small public data sets, by the protocols of published benchmarks."""
