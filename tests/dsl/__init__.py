"""Tests of dsl."""
