"""The front end: declarations, the IR, its verifier and its interpreter."""
