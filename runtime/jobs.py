"""Work in processes of their own: compiling kernels takes one processor each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeVar

Name = TypeVar("Name")
Arguments = TypeVar("Arguments")
Result = TypeVar("Result")

MOST = 16
"""Processes at most; each imports torch and a compiler."""
A_PROCESS = 4
"""So many kernels make one more process worth its start."""


def usual_jobs() -> int:
    """As many processes as there are processors, up to 16."""
    return max(1, min(MOST, len(os.sched_getaffinity(0))))


def jobs_for(kernels: int) -> int:
    """Processes for so many kernels: no more than are worth their start."""
    return max(1, min(usual_jobs(), kernels // A_PROCESS))


def in_processes(
    function: Callable[[Arguments], Result], each: Mapping[Name, Arguments], jobs: int
) -> Iterator[tuple[Name, Callable[[], Result]]]:
    """Call a function with each of some arguments.

    Args:
        function: of a module; its arguments and its result are pickled.
        each: the arguments, by any name.
        jobs: processes; with 1 the calls are made here, when their results are asked for.

    Yields:
        The names as their calls end, each with what gives the result, or raises as the call did.
        A process that is killed (for memory, say) ends the others; what they left is called here.
    """
    if jobs == 1:
        for name, arguments in each.items():
            yield name, partial(function, arguments)
        return
    # Fresh interpreters: what CUDA and its threads hold does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(function, arguments): name for name, arguments in each.items()}
        for future in as_completed(waiting):
            name = waiting[future]
            killed = isinstance(future.exception(), BrokenProcessPool)
            yield name, partial(function, each[name]) if killed else future.result
