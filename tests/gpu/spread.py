"""Run the GPU tier in several processes of one machine: compiling kernels is what takes the time.

    python tests/gpu/spread.py [--workers 12] [--every N] [--limit SECONDS] [--done FILE] [...]

Tests that measure time run last and alone. For machines without pytest-xdist; other arguments are
pytest's. Exit code 0 only if every process passed; those still running after the limit are
interrupted and count as failed. ``--done`` names a file that gets a line for every test that
passed; tests it has already are left out, so a tier can be run in several goes.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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


def finish(runs, until):
    """Wait for processes, and interrupt all at once when their time is over, so that they report.

    Yields exit code and log of each.
    """
    for process, _ in runs:
        with suppress(subprocess.TimeoutExpired):
            process.wait(until and max(until - time.monotonic(), 0))
    for process, _ in runs:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    over = time.monotonic() + 20
    for process, log in runs:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(over - time.monotonic(), 0))
        if process.poll() is None:
            process.kill()
        code = process.wait()
        log.seek(0)
        yield code, log.read()


def told(path):
    """Tests that a file says have passed."""
    return set(path.read_text().splitlines()) if path and path.exists() else set()


def main():
    """Deal the tests out, run, print the output of failing processes and one closing line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=1, help="run each N-th test only")
    parser.add_argument("--limit", type=float, help="seconds all processes together may take")
    parser.add_argument("--done", type=Path, help="file of the tests that passed")
    options, rest = parser.parse_known_args()
    if options.done:
        os.environ["ATTNCC_TEST_DONE"] = str(options.done.resolve())
    known = told(options.done)
    tests, timed = (
        [name for name in collect(rest, marked=marked) if name not in known]
        for marked in (False, True)
    )
    tests = tests[:: options.every]
    tests.sort(key=lambda name: "test_random" in name)  # what a limit cuts off
    if not tests + timed:
        sys.exit("every test has passed" if known else "no tests were collected")
    began, bad = time.monotonic(), 0
    workers = min(options.workers, len(tests))
    until = options.limit and began + options.limit
    for runs in ([tests[i :: options.workers] for i in range(workers)], [timed] if timed else []):
        if runs and until and time.monotonic() >= until:
            print("no time was left for:", *runs[0])
            bad += 1
            continue
        for code, text in finish([start(own) for own in runs], until):
            print(text[-30000:] if code else "\n".join(text.splitlines()[-8:]), flush=True)
            bad += code != 0
    print(f"{len(tests)} tests in {workers} processes, {time.monotonic() - began:.0f} s")
    print("those that measure time ran after them; processes that failed:", bad)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
