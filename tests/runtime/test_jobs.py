"""Work in processes of its own, and what becomes of it when one of them is killed."""

import os

import pytest

from attncc.runtime.jobs import A_PROCESS, in_processes, jobs_for, usual_jobs

PID = "__import__('os').getpid()"
KILLED = f"__import__('os')._exit(9) if __import__('multiprocessing').parent_process() else {PID}"


def test_results_come_from_other_processes_and_errors_as_they_were():
    found = dict(in_processes(eval, {"a": PID, "b": "2 * 2", "c": "1 / 0"}, 2))
    assert found["a"]() != os.getpid() and found["b"]() == 4
    with pytest.raises(ZeroDivisionError):
        found["c"]()


@pytest.mark.parametrize(("text", "jobs"), [(PID, 1), (KILLED, 2)])
def test_one_process_and_what_killed_ones_leave_is_done_here(text, jobs):
    found = dict(in_processes(eval, {"a": text, "b": text}, jobs))
    assert [found[name]() for name in "ab"] == [os.getpid()] * 2


def test_few_kernels_take_few_processes():
    assert jobs_for(0) == jobs_for(A_PROCESS) == 1
    assert jobs_for(1 << 10) == usual_jobs()
