"""Every mistake in a declaration has its own error, with its parts, the user's line and a caret."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attncc.dsl.api as ac
from attncc.dsl import errors
from attncc.dsl.errors import (
    AttnccError,
    ClosureError,
    DeclarationError,
    FoldClosedTwiceError,
    FreeAxisError,
    KindError,
    LifetimeError,
    MaskError,
    MissingAxisError,
    PatternError,
    ReservedNameError,
    SeveralErrors,
    SignatureError,
    StateAxesError,
    StateNotReturnedError,
    SymbolicError,
    UnknownAxisError,
)
from attncc.dsl.loc import Loc
from attncc.dsl.signature import RESERVED

Body = Callable[..., Any]


def mistake(body: Body, *, out: Any = "B T H", scan: str | None = None) -> AttnccError:
    with pytest.raises(DeclarationError) as caught:
        ac.op(out=out, scan=scan)(body)
    return caught.value


def check(
    error: AttnccError, cls: type[AttnccError], line: str | None = None, **parts: Any
) -> None:
    """Class and fields, and that the message shows them and ``line`` with a caret below it."""
    assert type(error) is cls
    assert {name: getattr(error, name) for name in parts} == parts
    assert error.op is not None
    text = str(error)
    for name in ("op", "argument", "axis"):
        if getattr(error, name) is not None:
            assert f"{name} {getattr(error, name)}" in text
    if line is not None:
        assert error.loc is not None and error.loc.file == __file__
        assert f"  --> {__file__}:{error.loc.line}:{error.loc.col}\n" in text
        shown, caret = text.split(f"{error.loc}\n")[1].splitlines()[:2]
        start, width = caret.index("^"), caret.count("^")
        assert shown[start : start + width] == line


# --- axes -----------------------------------------------------------------------------------------


def test_reducing_an_axis_that_no_operand_has() -> None:
    def f(q=ac.Activation("B T H D"), k=ac.Activation("B T H D")):
        return ac.dot(q, k, "K")

    check(
        mistake(f, out="B T H"),
        SeveralErrors,
    )

    def g(q=ac.Activation("B T H D")):
        return ac.sum(q, "D") + ac.amax(ac.sum(q, "D"), "K")

    check(
        mistake(g),
        UnknownAxisError,
        'ac.amax(ac.sum(q, "D"), "K")',
        op="g",
        axis="K",
        expected="one of: B T H",
        found="K",
    )


@pytest.mark.parametrize("of", [ac.index, ac.size, ac.rsqrt])
def test_size_or_index_of_an_axis_that_is_never_declared(of: Callable[[str], Any]) -> None:
    def f(q=ac.Activation("B T H")):
        return q * of("Z")

    check(mistake(f), UnknownAxisError, 'of("Z")', axis="Z", expected="one of: B H T", found="Z")


def test_an_output_pattern_with_an_axis_that_is_never_declared() -> None:
    def f(q=ac.Activation("B T H")):
        return q

    check(
        mistake(f, out="B T H E"),
        UnknownAxisError,
        op="f",
        argument="out[o]",
        axis="E",
        expected="one of: B H T",
        found="E",
    )


def test_a_scan_over_an_axis_that_no_tensor_has() -> None:
    def f(q=ac.Activation("B H"), s=ac.State("B H")):
        return s + q, s

    found = mistake(f, scan="T", out="B T H")
    assert isinstance(found, SeveralErrors)
    check(found.errors[0], UnknownAxisError, axis="T", expected="one of: B H", found="T")


def test_the_query_position_needs_an_axis_of_queries() -> None:
    def f(x=ac.Cache("B S")):
        return ac.sum(ac.between(x, "S"), "T S")

    check(mistake(f, out="B"), UnknownAxisError, 'ac.between(x, "S")', axis="T")


def test_unrolling_an_axis_that_no_value_has() -> None:
    def f(q=ac.Activation("B T H")):
        for x in ac.unroll("N", q):
            q = q + x
        return q

    check(mistake(f), UnknownAxisError, axis="N", op="f")


def test_heads_under_two_names_are_an_outer_product() -> None:
    def f(q=ac.Activation("B T H D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
        p = ac.softmax(ac.dot(q, k, "D"), "S")
        return ac.dot(p, v, "S")

    error = mistake(f, out="B T H E")
    check(
        error,
        FreeAxisError,
        'ac.dot(p, v, "S")',
        op="f",
        argument="out[o]",
        axis="Hkv",
        expected="B T H E",
        found="B T H Hkv E",
    )
    assert error.help is not None and "(Hkv G)" in error.help


def test_an_output_that_lacks_an_axis() -> None:
    def f(q=ac.Activation("B T H D")):
        return ac.sum(q, "H")

    check(
        mistake(f, out="B T H D"),
        MissingAxisError,
        'ac.sum(q, "H")',
        argument="out[o]",
        axis="H",
        expected="B T H D",
        found="B T D",
    )


def test_each_of_several_outputs_is_named_in_its_error() -> None:
    def f(q=ac.Activation("B T H")):
        return q, ac.sum(q, "H")

    check(mistake(f, out={"a": "B T H", "b": "B T H"}), MissingAxisError, argument="out[b]")


def test_a_history_closed_twice() -> None:
    def f(q=ac.Activation("B T H D"), k=ac.Cache("B S H D")):
        p = ac.softmax(ac.dot(q, k, "D"), "S")
        return ac.sum(ac.sum(p, "S"), "S")

    check(
        mistake(f),
        FoldClosedTwiceError,
        'ac.sum(ac.sum(p, "S"), "S")',
        op="f",
        axis="S",
    )


def test_a_second_pass_over_the_history_is_not_a_fold_closed_twice() -> None:
    @ac.op(out="B T H D")
    def two_hops(q=ac.Activation("B T H D"), k=ac.Cache("B S H D")):
        for _ in range(2):
            q = ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), k, "S")
        return ac.dot(k, ac.softmax(ac.dot(q, k, "D"), "S"), ac.sum(q, "D"), "S")

    assert two_hops.name == "two_hops"


@pytest.mark.parametrize("fold", [ac.softmax, ac.cumsum, ac.between, ac.at_query])
@pytest.mark.parametrize(("over", "cls"), [("S D", UnknownAxisError), ("", UnknownAxisError)])
def test_a_fold_works_along_one_axis(fold: Any, over: str, cls: type[AttnccError]) -> None:
    def f(k=ac.Cache("B S D")):
        return fold(k, over)

    check(mistake(f), cls, "fold(k, over)", op="f")


def test_an_unreadable_axis_list_in_the_body() -> None:
    def f(k=ac.Activation("B T H D")):
        return ac.sum(k, "D)")

    check(mistake(f), PatternError, 'ac.sum(k, "D)")', op="f", why="')' without '('")


def test_an_unreadable_pattern_in_the_signature() -> None:
    def f(q=ac.Activation("B T (H D")):
        return q

    check(mistake(f), PatternError, 'ac.Activation("B T (H D")', op="f", argument="q")
    assert mistake(lambda q=ac.Activation("B"): q, out="(B").argument == "out[o]"


# --- states, histories, windows -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda s, q: q, "(a value)"),
        (lambda s, q: (s, q, q), "(a value, a value, a value)"),
        (lambda s, q: None, "(None)"),
        (lambda s, q: (s, None), "(a value, None)"),
    ],
)
def test_a_body_that_does_not_return_its_state_and_outputs(result: Any, found: str) -> None:
    def f(q=ac.Activation("B T H"), s=ac.State("B H")):
        return result(s, q)

    check(mistake(f, scan="T"), StateNotReturnedError, op="f", expected="(s, o)", found=found)


def test_a_state_that_comes_back_with_other_axes() -> None:
    def f(q=ac.Activation("B T H K"), s=ac.State("B H K")):
        s = ac.sum(s * q, "K")
        return s, s

    check(
        mistake(f, scan="T"),
        StateAxesError,
        'ac.sum(s * q, "K")',
        op="f",
        argument="s",
        expected="B H K",
        found="B H",
    )


def test_a_state_with_an_axis_of_tokens() -> None:
    def f(q=ac.Activation("B T H"), s=ac.State("B T H")):
        return s + q, q

    check(
        mistake(f, scan="T"),
        StateAxesError,
        'ac.State("B T H")',
        argument="s",
        axis="T",
        found="B T H",
    )


@pytest.mark.parametrize("make", [ac.State, ac.Window])
def test_a_state_without_a_scan(make: Any) -> None:
    def f(q=ac.Activation("B T H"), s=make("B H W")):  # noqa: B008
        s = ac.push(s, ac.sum(q, "T"), "W") if make is ac.Window else s
        return s, q

    check(
        mistake(f),
        LifetimeError,
        'make("B H W")',
        argument="s",
        expected='scan="T" in the decorator',
        found="no scan",
    )


@pytest.mark.parametrize("ahead", [lambda: ac.causal, lambda: ac.index("S") > ac.index("T")])
def test_a_mask_over_other_tokens_in_a_scan(ahead: Callable[[], Any]) -> None:
    def f(q=ac.Activation("B T H"), s=ac.State("B H")):
        return ac.where(ahead(), s + q, s), q

    error = mistake(f, scan="T")
    assert isinstance(error, SeveralErrors)
    first, second = error.errors
    assert isinstance(first, UnknownAxisError) and (first.axis, first.found) == ("S", "S")
    assert isinstance(second, StateAxesError) and second.argument == "s"


@pytest.mark.parametrize(("make", "found"), [(ac.Cache, "cache"), (ac.Memory, "memory")])
def test_a_history_in_a_scan(make: Any, found: str) -> None:
    def f(q=ac.Activation("B T H"), k=make("B S H"), s=ac.State("B H")):  # noqa: B008
        return s + q, q

    check(
        mistake(f, scan="T"),
        LifetimeError,
        'make("B S H")',
        argument="k",
        expected="Activation or State",
        found=found,
    )


def test_a_cache_that_has_no_axis_to_grow_along() -> None:
    def f(q=ac.Activation("B T H"), k=ac.Cache("B L H")):
        return q * ac.sum(k, "L")

    check(mistake(f), LifetimeError, 'ac.Cache("B L H")', argument="k", found="B L H")


def test_a_window_that_is_not_pushed() -> None:
    def f(x=ac.Activation("B T H"), w=ac.Window("B H W")):
        return w, x

    check(mistake(f, scan="T"), LifetimeError, argument="w", expected="ac.push(w, row, axis)")


def test_a_window_pushed_twice_a_token() -> None:
    def f(x=ac.Activation("B T H"), w=ac.Window("B H W")):
        w = ac.push(ac.push(w, x, "W"), x, "W")
        return w, ac.sum(w, "W")

    error = mistake(f, scan="T")
    check(error, LifetimeError, 'ac.push(ac.push(w, x, "W"), x, "W")', expected="an ac.Window")


def test_a_row_that_already_has_the_axis_of_the_window() -> None:
    def f(x=ac.Activation("B T H W"), w=ac.Window("B H W")):
        w = ac.push(w, x, "W")
        return w, ac.sum(w, "W")

    check(mistake(f, scan="T"), UnknownAxisError, 'ac.push(w, x, "W")', argument="w", axis="W")


# --- masks and kinds ------------------------------------------------------------------------------


def test_a_causal_mask_over_a_foreign_memory() -> None:
    def f(q=ac.Activation("B T H D"), k=ac.Memory("B S H D")):
        p = ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal)
        return ac.dot(p, k, "S")

    check(
        mistake(f, out="B T H D"),
        MaskError,
        'ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal)',
        axis="S",
        expected="a mask of S alone, or a Cache",
        found="T against S",
    )


@pytest.mark.parametrize("fold", [ac.softmax, lambda x, a, where: ac.topk(x, a, k=2, where=where)])
def test_a_mask_that_is_a_number(fold: Any) -> None:
    def f(q=ac.Cache("B S"), t=ac.Activation("T")):
        return fold(q, "S", where=ac.index("S") - 1) * t

    found = mistake(f, out="B S T")
    first = found.errors[0] if isinstance(found, SeveralErrors) else found
    check(first, MaskError, axis="S", expected="a comparison", found="a number")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda q, m: q * m, "q * m"),
        (lambda q, m: 1.0 * m + q, "1.0 * m"),
        (lambda q, m: q & q, "q & q"),
        (lambda q, m: ~q, "~q"),
        (lambda q, m: -m + q, "-m"),
        (lambda q, m: ac.where(q, q, q), "ac.where(q, q, q)"),
        (lambda q, m: ac.where(m, m, q), "ac.where(m, m, q)"),
        (lambda q, m: ac.cumsum(m, "T") + q, 'ac.cumsum(m, "T")'),
        (lambda q, m: ac.sum(m, "T") + q, 'ac.sum(m, "T")'),
        (lambda q, m: ac.dot(q, m, "T") + q, 'ac.dot(q, m, "T")'),
        (lambda q, m: ac.softmax(m, "T") + q, 'ac.softmax(m, "T")'),
        (lambda q, m: ac.softmax(q, "T", sink=m), 'ac.softmax(q, "T", sink=m)'),
        (lambda q, m: (m < m) & (q < 0), "m < m"),
    ],
)
def test_truth_values_and_numbers_do_not_mix(body: Body, line: str) -> None:
    def f(q=ac.Activation("B T H")):
        return body(q, q > 0)

    error = mistake(f)
    found = error.errors if isinstance(error, SeveralErrors) else (error,)
    first = next(e for e in found if isinstance(e, KindError))
    check(first, KindError, line, op="f")
    assert {first.expected, first.found} == {"a number", "a truth value"}


def test_a_sink_with_the_axis_that_the_softmax_closes() -> None:
    def f(q=ac.Activation("B T H"), k=ac.Cache("B S H"), b=ac.Param("S")):
        return ac.dot(ac.softmax(q * k, "S", sink=b), k, "S")

    check(mistake(f), FreeAxisError, argument="sink", axis="S", found="S")


# --- signature ------------------------------------------------------------------------------------


def test_an_argument_without_a_declaration() -> None:
    def f(q=ac.Activation("B T H"), *, scale):
        return q * scale

    check(mistake(f), SignatureError, op="f", argument="scale", found="no default")

    def g(q=ac.Activation("B T H"), scale=0.5):
        return q * scale

    check(mistake(g), SignatureError, op="g", argument="scale", found="0.5")


@pytest.mark.parametrize("name", ["*rest", "**rest"])
def test_arguments_that_have_no_name_of_their_own(name: str) -> None:
    space: dict[str, Any] = {"ac": ac}
    exec(f'def f(q=ac.Activation("B T H"), {name}):\n    return q', space)
    check(mistake(space["f"]), SignatureError, op="f", argument="rest", found=name)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_an_argument_named_like_a_call_option(name: str) -> None:
    space: dict[str, Any] = {"ac": ac}
    exec(f'def f({name}=ac.Activation("B T H")):\n    return {name}', space)
    check(mistake(space["f"]), ReservedNameError, op="f", argument=name)


@pytest.mark.parametrize("name", ["s", "lse", "_x", "two words"])
def test_an_output_name_that_the_result_cannot_have(name: str) -> None:
    def f(q=ac.Activation("B T H"), s=ac.State("B H")):
        return s + q, s

    error = mistake(f, scan="T", out={name: "B T H"})
    check(error, SignatureError, argument=f"out[{name}]", found=name)


# --- closures -------------------------------------------------------------------------------------

GLOBAL = torch.ones(3)


def test_a_global_tensor_is_not_captured() -> None:
    def f(q=ac.Activation("B T H")):
        return q * GLOBAL

    error = mistake(f)
    check(error, ClosureError, argument="GLOBAL", found="a captured tensor")
    assert error.help == 'declare it: GLOBAL=ac.Param("...")'


@pytest.mark.parametrize("make", [torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))])
def test_a_tensor_of_an_enclosing_function_is_not_captured(make: Any) -> None:
    slopes = make(3)

    def f(q=ac.Activation("B T H")):
        return q * slopes

    check(mistake(f), ClosureError, argument="slopes")


@pytest.mark.parametrize(
    "use",
    [
        lambda q, w: q * w.x,
        lambda q, w: w.x * q,
        lambda q, w: torch.add(w.x, q),
        lambda q, w: ac.where(q > 0, q, w.x),
        lambda q, w: ac.sum(w.x, "H"),
    ],
)
def test_a_tensor_reached_through_an_object_is_caught_on_either_side(use: Body) -> None:
    class Holder:
        x = torch.ones(3)

    def f(q=ac.Activation("B T H")):
        return use(q, Holder)

    error = mistake(f)
    check(error, ClosureError, found="a captured tensor")
    assert error.loc is not None and error.loc.file == __file__


def test_a_body_may_close_over_numbers_and_functions() -> None:
    scale, twice = 2.5, (lambda x: x + x)

    @ac.op(out="B T H")
    def f(q=ac.Activation("B T H")):
        return twice(q) * scale

    assert len(f.tensors) == 1


# --- Python on symbolic values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "line", "form"),
    [
        (lambda q: q > 0 and q < 1, None, "&"),
        (lambda q: q > 0 or q < 1, None, "|"),
        (lambda q: not q, None, "~"),
        (lambda q: q if q > 0 else -q, None, "ac.where"),
        (lambda q: 0 < q < 1, None, "&"),
        (lambda q: q == 0, "q == 0", "ac.eq(a, b)"),
        (lambda q: 0.5 == q, "0.5 == q", "ac.eq(a, b)"),  # noqa: SIM300
        (lambda q: q != 0, "q != 0", "~ac.eq(a, b)"),
        (lambda q: math.exp(q), "math.exp(q)", "ac.exp(x)"),
        (lambda q: torch.exp(q), "torch.exp(q)", "ac.exp(x)"),
        (lambda q: torch.nn.functional.silu(q), None, "of attncc"),
        (lambda q: np.exp(q), "np.exp(q)", "ac.exp(x)"),
        (lambda q: np.ones(3) * q, "np.ones(3) * q", "of attncc"),
        (lambda q: q @ q, "q @ q", 'ac.dot(a, b, "K")'),
        (lambda q: q**2, "q**2", "x * x"),
        (lambda q: 2**q, "2**q", "ac.exp"),
        (lambda q: len(q), "len(q)", 'ac.size("T")'),
        (lambda q: [x for x in q], None, "ac.unroll"),
        (lambda q: q[0], "q[0]", "ac.take"),
        (lambda q: q[ac.index("T")], 'q[ac.index("T")]', "x[J]"),
        (lambda q: q[:, None], "q[:, None]", "x[J]"),
        (lambda q: range(q), "range(q)", "ac.unroll"),
        (lambda q: float(q), "float(q)", "of attncc"),
        (lambda q: int(q), "int(q)", "the value itself"),
    ],
)
def test_python_on_a_symbolic_value_names_the_form_to_write(
    body: Body, line: str | None, form: str
) -> None:
    def f(q=ac.Activation("B T H")):
        return body(q)

    error = mistake(f)
    check(error, SymbolicError, line, op="f")
    assert error.loc is not None and error.loc.file == __file__ and error.loc.col
    assert error.help is not None and form in error.help


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (lambda q: q + "1", "'1'"),
        (lambda q: ac.exp(None), "None"),
        (lambda q: q * np.ones(2, np.float32), "array([1., 1.], dtype=float32)"),
        (lambda q: ac.topk(q, "H", k=0), "0"),
        (lambda q: ac.topk(q, "H", k=2.0), "2.0"),
    ],
)
def test_a_foreign_object_in_the_body(body: Body, found: str) -> None:
    def f(q=ac.Activation("B T H")):
        return body(q)

    check(mistake(f), SymbolicError, op="f", found=found)


@pytest.mark.parametrize("body", [lambda q: ac.dot(q, "H"), lambda q: ac.dot(q, q, q)])
def test_a_contraction_needs_two_operands_and_an_axis(body: Body) -> None:
    def f(q=ac.Activation("B T H")):
        return body(q)

    check(mistake(f), SymbolicError, op="f")


# --- the errors themselves ------------------------------------------------------------------------


def test_several_mistakes_are_reported_at_once() -> None:
    def f(q=ac.Activation("B T H D"), k=ac.Memory("B S H D"), s=ac.State("B H")):
        p = ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal)
        return s, ac.dot(p, k, "S") * ac.size("Z")

    error = mistake(f, out="B T H")
    assert isinstance(error, SeveralErrors)
    kinds = [type(e) for e in error.errors]
    assert kinds == [LifetimeError, UnknownAxisError, MaskError, FreeAxisError]
    assert all(str(e) in str(error) for e in error.errors)
    assert str(error).count("-->") == 4


def test_one_mistake_seen_by_two_checks_is_reported_once() -> None:
    def f(q=ac.Activation("B T H")):
        return q * ac.size("Z") + q * ac.rsqrt("Z")

    assert isinstance(mistake(f), UnknownAxisError)


CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AttnccError)),
    key=lambda c: c.__name__,
)


def example(cls: type[AttnccError]) -> AttnccError:
    parts: dict[str, Any] = {
        "op": "attention", "argument": "q", "axis": "D", "expected": (1, 2), "found": "B T",
        "loc": Loc("model.py", 3, 5, 9), "help": "mend it",
    }  # fmt: skip
    if cls is SeveralErrors:
        return SeveralErrors((example(KindError), example(SizeErrorClass)), op="attention")
    if cls is PatternError:
        return PatternError("B (T", "'(' without ')'", **parts)
    if cls is errors.ExhaustedError:
        return errors.ExhaustedError("page", wanted=5, free=2, **parts)
    if cls is errors.MiscompiledError:
        made = {"plans": ("rule",), "versions": {"triton": "3.6.0"}, "why": "o: error 1 > 0.1"}
        return errors.MiscompiledError(("attention__prefill",), **made, **parts)
    return cls("something is wrong", **parts)


SizeErrorClass = errors.SizeError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_errors_pickle_with_all_their_parts(cls: type[AttnccError], through: Any) -> None:
    error = example(cls)
    back = through(error)
    assert type(back) is cls
    assert str(back) == str(error)
    own = {k: v for k, v in vars(error).items() if k != "errors"}
    assert {k: v for k, v in vars(back).items() if k != "errors"} == own
    if isinstance(error, SeveralErrors):
        assert [str(e) for e in back.errors] == [str(e) for e in error.errors]


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (KindError, TypeError),
        (SymbolicError, TypeError),
        (ClosureError, TypeError),
        (FreeAxisError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.RankError, ValueError),
        (errors.BackendError, NotImplementedError),
        (errors.RefusedError, NotImplementedError),
        (errors.ToolchainError, RuntimeError),
    ],
)
def test_errors_are_also_the_matching_builtin(
    cls: type[AttnccError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise example(cls)


def test_the_caret_counts_characters_not_bytes() -> None:
    def f(q=ac.Activation("B T H")):
        return q * len("αβγδ") + ac.sum(q, "Z") * 2

    check(mistake(f), UnknownAxisError, 'ac.sum(q, "Z")', axis="Z")
