"""The interpreter tier: every kernel runs on the CPU. It needs a process of its own."""

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit(
        "tests/interpreter: triton was imported before TRITON_INTERPRET=1 was set; "
        "run this folder in a process of its own (pytest tests/interpreter)",
        returncode=4,
    )
os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter.triton_patch import install

install()
