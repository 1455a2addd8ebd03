"""Run the GPU tier in several processes of one machine: compiling kernels is what takes the time.

    python tests/gpu/spread.py [--workers 12] [--every N] [--limit SECONDS] [pytest arguments]

For machines without pytest-xdist. Exit code 0 only if every process passed; a process that is
still running after the limit is interrupted and counts as failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIER = Path(__file__).resolve().parent


def collect(arguments):
    """Test ids of the tier."""
    run = subprocess.run(
        ["pytest", str(TIER), "--collect-only", "-q", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [line for line in run.stdout.splitlines() if "::" in line]


def wait(process, seconds):
    """Exit code of a process; interrupted when its seconds are over, so that it still reports."""
    try:
        return process.wait(None if seconds is None else max(seconds, 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main():
    """Deal the tests out, run, print the output of failing processes and one closing line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=1, help="run each N-th test only")
    parser.add_argument("--limit", type=float, help="seconds all processes together may take")
    options, rest = parser.parse_known_args()
    tests = collect(rest)[:: options.every]
    tests.sort(key=lambda name: "test_random" in name)  # what a limit cuts off
    if not tests:
        sys.exit("no tests were collected")
    started = time.monotonic()
    runs = []
    for i in range(min(options.workers, len(tests))):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        mine = tests[i :: options.workers]
        options_of_each = ["-q", "--tb=short", "-rf", "--durations=6", "-p", "no:cacheprovider"]
        command = ["pytest", *options_of_each, *mine]
        runs.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log))
    bad = 0
    for process, log in runs:
        code = wait(process, options.limit and started + options.limit - time.monotonic())
        log.seek(0)
        text = log.read()
        print(text[-30000:] if code else "\n".join(text.splitlines()[-8:]))
        bad += code != 0
    print(f"{time.monotonic() - started:.0f} s")
    print(f"{len(tests)} tests in {len(runs)} processes, {bad} processes failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
