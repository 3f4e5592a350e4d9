"""What the benchmark is measured against: the fixed work, raw ZeroMQ, Ray and Dask on the same blocks."""
