"""The tables of docs/benchmarks.md, written from the JSON of a benchmark run."""
