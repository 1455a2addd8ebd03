"""``python -m benchmarks``."""

import os
import sys

from benchmarks.cli import main

try:
    code = main()
    sys.stdout.flush()
except BrokenPipeError:  # whoever reads has read enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 1
sys.exit(code)
