"""Benchmarks: each checks the answer before it prints a time."""
