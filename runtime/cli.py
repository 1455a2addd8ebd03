"""The console command's entry: it must say what is missing where its extra is not installed."""

from __future__ import annotations

import importlib.util
import sys

USAGE = 2


def main() -> int:
    """Run ``attncc``.

    Returns:
        The exit code: 0 done, 1 a finding or failure, 2 wrong usage, 3 it needs a GPU.
    """
    lacking = [n for n in ("typer", "rich") if importlib.util.find_spec(n) is None]
    if lacking:
        names = " and ".join(lacking)
        print(f"attncc: the command needs {names}: pip install 'attncc[cli]'", file=sys.stderr)
        return USAGE
    from attncc.runtime.commands import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
