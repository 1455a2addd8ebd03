"""Printers of expressions, one dialect a file."""
