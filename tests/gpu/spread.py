"""Run the GPU tier in several processes of one machine: compiling kernels is what takes the time.

    python tests/gpu/spread.py [--workers 12] [--every N] [pytest arguments]

For machines without pytest-xdist. Exit code 0 only if every process passed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TIER = Path(__file__).resolve().parent


def collect(arguments):
    """Test ids of the tier."""
    run = subprocess.run(
        ["pytest", str(TIER), "--collect-only", "-q", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [line for line in run.stdout.splitlines() if "::" in line]


def main():
    """Deal the tests out, run, print the output of failing processes and one closing line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=1, help="run each N-th test only")
    options, rest = parser.parse_known_args()
    tests = collect(rest)[:: options.every]
    if not tests:
        sys.exit("no tests were collected")
    runs = []
    for i in range(min(options.workers, len(tests))):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        mine = tests[i :: options.workers]
        command = ["pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *mine]
        runs.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log))
    bad = 0
    for process, log in runs:
        code = process.wait()
        log.seek(0)
        text = log.read()
        print(text[-6000:] if code else text.splitlines()[-1])
        bad += code != 0
    print(f"{len(tests)} tests in {len(runs)} processes, {bad} processes failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
