"""Benchmarks of torchembed and other libraries; each run checks the results that it times."""
