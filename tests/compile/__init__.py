"""Tests that compile the generated kernels for GPUs that need not be there."""
