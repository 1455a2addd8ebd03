"""Run the GPU tier in several processes of one machine: compiling kernels is what takes the time.

    python tests/gpu/spread.py [--workers 12] [--every N] [--limit SECONDS] [pytest arguments]

Tests that measure time run last and alone. For machines without pytest-xdist. Exit code 0 only if
every process passed; a process that is still running after the limit is interrupted and counts as
failed.
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


def collect(arguments, marked):
    """Test ids of the tier, those that measure time or the others."""
    only = ["-m", "timing" if marked else "not timing"]
    run = subprocess.run(
        ["pytest", str(TIER), "--collect-only", "-q", *only, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [line for line in run.stdout.splitlines() if "::" in line]


def start(tests):
    """A process that runs some tests, and its log."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
    options = ["-q", "--tb=short", "-rf", "--durations=6", "-p", "no:cacheprovider"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the processes are as many as the cores
    command = ["pytest", *options, *tests]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=alone), log


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
    tests = collect(rest, marked=False)[:: options.every]
    tests.sort(key=lambda name: "test_random" in name)  # what a limit cuts off
    timed = collect(rest, marked=True)
    if not tests + timed:
        sys.exit("no tests were collected")
    began = time.monotonic()
    workers = min(options.workers, len(tests))
    runs = [start(tests[i :: options.workers]) for i in range(workers)]
    bad = 0
    while runs:
        process, log = runs.pop(0)
        code = wait(process, options.limit and began + options.limit - time.monotonic())
        log.seek(0)
        text = log.read()
        print(text[-30000:] if code else "\n".join(text.splitlines()[-8:]), flush=True)
        bad += code != 0
        if not runs and timed:  # alone
            runs, timed = [start(timed)], []
    print(f"{len(tests)} tests in {workers} processes, {time.monotonic() - began:.0f} s")
    print("those that measure time ran after them; processes that failed:", bad)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
