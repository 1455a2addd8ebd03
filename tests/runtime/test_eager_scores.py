"""The breadth of scores in the torch lowering, against the interpreter."""

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import ArgumentError, LogBaseError
from attncc.runtime.eager import blocks
from tests import score_ops as ops
from tests.runtime.eager_ops import check
from tests.strategies import randn
from tests.tolerance import max_error


@pytest.mark.parametrize("name", list(ops.CASES))
@pytest.mark.parametrize("blocked", [False, True])
def test_every_case(name: str, blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocked:
        monkeypatch.setattr(blocks, "BUDGET", 900)
    for t, s in ((33, 33), (5, 40), (1, 65), (4, 2)):
        check(ops.CASES[name][0], **ops.arguments(name, 2, t, s, torch.float32))


@pytest.mark.parametrize("name", ["differential", "shared_prefix", "softmax_and_sum"])
def test_the_lse_of_folds_that_have_one(name: str) -> None:
    op = ops.CASES[name][0]
    form = analyse(op.declaration.trace()).softmax
    assert form is not None
    if name == "shared_prefix":
        check(op, **ops.arguments(name, 2, 5, 40, torch.float32), return_lse=True)


def test_a_prefix_that_is_empty_is_no_prefix() -> None:
    args = ops.arguments("shared_prefix", 2, 5, 40, torch.float32)
    args |= {n: args[n][:0] for n in ("pk", "pv")}
    check(ops.shared_prefix, **args, return_lse=True)
    sinks = randn(3, 4).float()
    check(ops.shared_prefix, **{**args, "sink": sinks})


@pytest.mark.parametrize("name", ["documents", "relative", "shared_prefix"])
def test_partials_of_two_halves_merge_to_the_whole(name: str) -> None:
    op = ops.CASES[name][0]
    args = ops.arguments(name, 2, 1, 60, torch.bfloat16)
    args |= {"sink": randn(3, 4).float()} if "sink" in args else {}
    whole = op(**args, backend="torch", return_partial=True)
    assert whole.base is ac.LogBase.E and whole.u.dtype == torch.float32
    free = ac.op(out="B T (Hkv G) E")(_scores_only)
    q, k, v = (args[n] for n in "qkv")
    parts = [
        free(q, k[:, cut], v[:, cut], backend="torch", return_partial=True)
        for cut in (slice(0, 0), slice(0, 17), slice(17, 60))
    ]
    merged = ac.merge(parts)
    exact = free.reference(q, k, v, return_lse=True)
    assert max_error(merged.o, exact.o) < 1e-5
    assert max_error(merged.lse, exact.lse) < 1e-5


def _scores_only(  # type: ignore[no-untyped-def]
    q=ac.Activation("B T (Hkv G) D"), k=ac.Memory("B S Hkv D"), v=ac.Memory("B S Hkv E")
):
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S"), v, "S")


def test_a_partial_leaves_its_sink_out() -> None:
    args = ops.arguments("relative", 2, 5, 40, torch.float32)
    part = ops.relative(**args, backend="torch", return_partial=True)
    whole = ops.relative.reference(**args, return_lse=True)
    done = part.with_sink(args["sink"].expand(2, 5, 4))
    assert max_error(done.o, whole.o) < 1e-5 and max_error(done.lse, whole.lse) < 1e-5
    exact = ops.relative.reference(**args, return_partial=True)
    assert exact.o.dtype == torch.float64 and max_error(part.o, exact.o) < 1e-5


def test_partials_of_two_log_bases_do_not_mix() -> None:
    args = ops.arguments("documents", 1, 3, 9, torch.float32)
    part = ops.documents(**args, backend="torch", return_partial=True)
    with pytest.raises(LogBaseError):
        ac.merge([part, part.to(ac.LogBase.TWO)])


@pytest.mark.parametrize("name", ["differential", "two_values", "rectified"])
def test_what_is_not_one_softmax_fold_gives_no_partial(name: str) -> None:
    args = ops.arguments(name, 1, 3, 9, torch.float32)
    with pytest.raises(ArgumentError, match="return_partial"):
        ops.CASES[name][0](**args, return_partial=True)
