"""From a function to a program: folding, locations, sharing, sizes asked for."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attncc.dsl.api as ac
from attncc.dsl.errors import MissingAxisError
from attncc.dsl.graph import axes_of, kind_of, rebuild, walk
from attncc.dsl.ir import Contract, Fn, Index, Input, Kind, Lit, Map, Node, Reduce, Select, TopK
from attncc.dsl.library.attention import attention
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.dsl.signature import RESERVED
from attncc.dsl.text import nodes_text, program_text
from attncc.dsl.types import Value

ROOT = Path(__file__).resolve().parents[2]


@ac.op(scan="T", out="B T (Hk G) V")
def delta_rule(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    s=ac.State("B (Hk G) K V"),
):
    s = s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


def nodes(op: ac.Declaration, *given: str) -> list[Node]:
    return list(walk(*op.trace(frozenset(given)).roots))


def test_the_gated_rule_without_gates_is_the_delta_rule() -> None:
    plain = gated_delta_rule.trace(frozenset())
    assert nodes_text(*plain.roots) == nodes_text(*delta_rule.trace().roots)


def test_a_given_gate_is_in_the_program_and_an_absent_one_is_not() -> None:
    assert {n.name for n in nodes(gated_delta_rule, "g") if isinstance(n, Input)} == set("qkvgs")
    assert {n.name for n in nodes(gated_delta_rule) if isinstance(n, Input)} == set("qkvs")


def test_absent_decay_between_positions_folds_away() -> None:
    @ac.op(out="B T H E")
    def forgetting(
        q=ac.Activation("B T H D"),
        k=ac.Cache("B S H D"),
        v=ac.Cache("B S H E"),
        f=ac.Cache("B S H"),
        bias=ac.Activation("B S H", default=0),
    ):
        score = ac.dot(q, k, "D") + ac.between(bias, "S") + ac.cumsum(bias, "S") + ac.sum(bias, "S")
        return ac.dot(ac.softmax(score + ac.between(f, "S"), "S", where=ac.causal), v, "S")

    assert sum(type(n).__name__ in ("Between", "Cumulative") for n in nodes(forgetting)) == 1
    assert sum(type(n).__name__ in ("Between", "Cumulative") for n in nodes(forgetting, "bias")) > 1


def test_neutral_elements_fold_but_zero_times_x_does_not() -> None:
    x = Value(Input("x", ("K",), lifetime=attention.tensors[0].lifetime))
    for same in (x * 1, 1 * x, x / 1, x + 0, 0 + x, x - 0, -(x.__neg__())):
        assert same.node is x.node
    assert isinstance((x * 0).node, Map)  # 0 * NaN is NaN
    assert ac.exp(0).node == Lit(1.0)


def test_literals_of_different_kinds_are_different_nodes() -> None:
    assert len({Lit(1), Lit(1.0), Lit(True), Lit(0.0), Lit(-0.0)}) == 5
    assert [kind_of(Lit(v)) for v in (1, 1.0, True)] == [Kind.INT, Kind.REAL, Kind.BOOL]


def test_numpy_scalars_print_as_plain_numbers() -> None:
    assert ac.exp(np.float64(0.5)).node == ac.exp(0.5).node
    assert "np." not in nodes_text(ac.exp(np.float64(0.5)).node)


def test_equal_expressions_are_one_object() -> None:
    def products(n: Node) -> bool:
        return isinstance(n, Map) and n.fn is Fn.MUL

    @ac.op(out="B T")
    def twice(x=ac.Activation("B T"), y=ac.Activation("B T")):
        return x * y + x * y

    (root,) = twice.trace().roots
    assert isinstance(root, Map)
    assert root.args[0] is root.args[1]
    assert sum(map(products, walk(root))) == 1


def test_a_sum_of_products_is_a_contraction_and_constants_leave_it() -> None:
    @ac.op(out="B T")
    def reads(s=ac.Activation("B T K"), k=ac.Activation("B T K"), g=ac.Activation("B T")):
        return ac.sum(g * (s * k), "K")

    (root,) = reads.trace().roots
    assert isinstance(root, Map) and root.fn is Fn.MUL
    assert root.args[0] == Input("g", ("B", "T"), attention.tensors[0].lifetime)
    assert isinstance(root.args[1], Contract) and len(root.args[1].args) == 2


def test_a_sum_of_one_thing_is_a_reduction() -> None:
    @ac.op(out="B T")
    def total(x=ac.Activation("B T K")):
        return ac.sum(2.0 * x, "K")

    assert isinstance(total.trace().roots[0], Reduce)


def test_nodes_carry_the_line_they_were_written_on() -> None:
    here = Path(__file__).read_text(encoding="utf-8").splitlines()
    state, _ = delta_rule.trace().roots
    assert state.loc.file == __file__
    line = here[state.loc.line - 1]
    assert line[state.loc.col - 1 : state.loc.end_col - 1] == 's + k * (v - ac.dot(s, k, "K"))'


def test_the_index_of_the_scanned_axis_is_a_scalar() -> None:
    @ac.op(scan="T", out="B T")
    def positions(x=ac.Activation("B T"), s=ac.State("B")):
        return s + x, x * ac.index("T")

    found = [n for n in walk(*positions.trace().roots) if isinstance(n, Index)]
    assert found == [Index("T", scalar=True)]
    assert axes_of(found[0]) == ()


@ac.op(scan="T", out="B T H V")
def householder(
    k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"), s=ac.State("B H K V")
):
    for kj, vj in ac.unroll("N", k, v):
        s = s + kj * (vj - ac.dot(s, kj, "K"))
    return s, ac.dot(s, kj, "K")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_unroll_traces_again_for_each_size(n: int) -> None:
    program = householder.trace(sizes={"N": n, "T": 7})
    picks = {x.at for x in walk(*program.roots) if isinstance(x, Select)}
    assert picks == set(range(n))
    assert program.sizes == (("N", n),)
    assert householder.trace(sizes={"N": n, "T": 9}) is program  # T was not asked for


def test_a_trace_without_the_asked_size_says_which_it_took() -> None:
    assert householder.asked == ("N",)
    assert householder.trace().sizes == (("N", 2),)
    assert "size N = 2" in program_text(householder.trace())


def test_a_long_unroll_needs_no_deep_stack() -> None:
    program = householder.trace(sizes={"N": 400})
    assert axes_of(program.roots[1]) == ("B", "H", "V")
    assert kind_of(program.roots[0]) is Kind.REAL


def test_each_topk_opens_its_own_axis_and_none_of_the_signature() -> None:
    @ac.op(out="B T J")
    def picks(x=ac.Cache("B S"), y=ac.Activation("B T J")):
        a, b = (ac.topk(x, "S", k=k, where=ac.causal) for k in (2, 3))
        return ac.sum(x[a], a) + ac.sum(x[b], b) + y

    assert sorted(n.axis for n in nodes(picks) if isinstance(n, TopK)) == ["J1", "J2"]


def test_whole_and_real_host_numbers_are_declared_apart() -> None:
    @ac.op(out="B T")
    def f(x=ac.Activation("B T"), w=ac.param(integer=True, default=3), c=ac.param(default=3)):
        return x * ac.where(ac.index("T") < w, 1.0, c)

    assert Lit(3) in nodes(f) and Lit(3.0) in nodes(f)
    kinds = {n.name: n.kind for n in nodes(f, "w", "c") if isinstance(n, Input)}
    assert kinds == {"x": Kind.REAL, "w": Kind.INT, "c": Kind.REAL}


def test_rebuild_keeps_what_does_not_change_and_the_locations() -> None:
    (root,) = attention.trace().roots
    assert rebuild(root, lambda n: n) is root
    swapped = rebuild(root, lambda n: Lit(2.0) if isinstance(n, Input) else n)
    assert isinstance(swapped, Contract)
    assert swapped.args[1] == Lit(2.0) and swapped.loc == root.loc


def test_a_node_from_another_process_equals_ours() -> None:
    code = (
        "import pickle, sys; from attncc.dsl.library.attention import attention;"
        "sys.stdout.buffer.write(pickle.dumps(attention.trace()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / '.pkg')!r}); {code}"],
        capture_output=True,
        check=True,
        env={"PYTHONHASHSEED": "1"},
    )
    theirs = pickle.loads(done.stdout)
    assert theirs == attention.trace()
    assert set(walk(*theirs.roots)) == set(walk(*attention.trace().roots))


def test_kinds_follow_the_operands() -> None:
    t, s = ac.index("T"), ac.index("S")
    whole, real, truth = t - s, (t - s) / 2, t >= s
    assert [kind_of(v.node) for v in (whole, real, truth)] == [Kind.INT, Kind.REAL, Kind.BOOL]
    assert kind_of(ac.where(truth, whole, 0).node) is Kind.INT
    assert kind_of(ac.where(truth, whole, 0.5).node) is Kind.REAL
    assert kind_of((truth & ~truth).node) is Kind.BOOL


def test_a_deep_shared_expression_is_visited_once() -> None:
    def power() -> Node:
        x = ac.size("D") + 1
        for _ in range(60):
            x = x * x
        return x.node

    assert kind_of(power()) is Kind.INT
    assert sum(1 for _ in walk(power())) == 63
    assert power() == power()


def test_reserved_names_are_those_of_the_design() -> None:
    assert {"out", "cu_seqlens", "lengths", "return_lse", "backend", "cache"} <= RESERVED


def test_math_on_names_means_their_sizes() -> None:
    assert ac.rsqrt("D").node == ac.rsqrt(ac.size("D")).node


def test_a_mistake_of_an_absent_argument_shows_when_the_op_is_declared() -> None:
    with pytest.raises(MissingAxisError, match="axis G") as caught:

        @ac.op(out="B T (H G)")
        def scaled(x=ac.Activation("B T H"), w=ac.Activation("B T (H G)", default=1)):
            return x * w

    assert caught.value.loc is not None

    asked: list[str] = []

    @ac.op(out="B T H")
    def three(
        x=ac.Activation("B T H"), a=ac.Activation("B T H", default=0),
        b=ac.Activation("B T H", default=0), p=ac.param(default=2.0),
    ):  # fmt: skip
        here = [n for n, v in (("a", a), ("b", b), ("p", p)) if isinstance(v.node, Input)]
        asked.append(" ".join(here))
        return x + a + b * p

    assert sorted(asked) == ["", "a b", "a b p", "a p", "b p"]
