"""What runs: compiling, storing, launching and the methods of an operation."""
