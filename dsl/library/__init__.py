"""Declared operations, one a file."""
