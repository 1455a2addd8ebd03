"""Tests of codegen."""
