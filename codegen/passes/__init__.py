"""Passes over programs, one a file."""
