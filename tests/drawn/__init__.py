"""Random declarations with inputs to match: what the properties over both forms draw from."""
