"""attncc: the attention-cache compiler."""

__version__ = "0.1.0"
