"""Tests of the generated kernels in the interpreter of Triton."""
