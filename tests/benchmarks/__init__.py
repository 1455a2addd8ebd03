"""Tests of the benchmarks that need no GPU."""
