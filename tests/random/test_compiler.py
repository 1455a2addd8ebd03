"""Random declarations: the compiler's own promises about any of them."""

from random import Random

import torch
from hypothesis import given

import attncc as ac
from attncc.codegen.forms import AffineForm, MaskForm, Refusal, SoftmaxForm
from attncc.codegen.passes.find_affine import find_affine
from attncc.codegen.passes.find_masks import find_mask
from attncc.codegen.passes.find_softmax import find_softmax
from attncc.dsl.axes import union
from attncc.dsl.facts import query_offset
from attncc.dsl.graph import walk
from attncc.dsl.interp import Env, Named, evaluate, unpack
from attncc.dsl.ir import Fn, Index, Input, Lit, Map, Node, Program, Softmax
from attncc.dsl.text import program_text
from tests.drawn.calls import Point, arguments
from tests.drawn.source import Drawn, load
from tests.examples import examples
from tests.strategies_ops import declarations, folds, randoms


def traced(drawn: Drawn, r: Random) -> Program:
    optional = [a.name for a in drawn.args if a.default is not None]
    present = frozenset(n for n in optional if r.randint(0, 1))
    return drawn.op.declaration.trace(present, dict(drawn.sizes))


@examples(100)
@given(declarations(), randoms())
def test_a_second_trace_gives_the_same_text(drawn: Drawn, r):
    program = traced(drawn, r)
    again = load(drawn.source, drawn.path).declaration.trace(program.given, dict(drawn.sizes))
    assert program_text(again) == program_text(program)
    assert again == program and hash(again) == hash(program)


@examples(100)
@given(declarations(), randoms())
def test_a_form_or_a_refusal_that_points_into_the_declaration(drawn: Drawn, r):
    program = traced(drawn, r)
    for found in (find_affine(program), find_softmax(program)):
        assert isinstance(found, (AffineForm, SoftmaxForm, Refusal))
        if isinstance(found, Refusal):
            assert found.loc.file == str(drawn.path), found
            assert 0 < found.loc.line <= len(drawn.source.splitlines()), found
            assert found.reason


@examples(100)
@given(declarations(), randoms())
def test_every_node_points_into_the_declaration(drawn: Drawn, r):
    program = traced(drawn, r)
    lines = drawn.source.splitlines()
    for node in walk(*program.roots):
        if isinstance(node, Input):
            continue
        if isinstance(node, (Map, Index)) and node in walk(ac.causal.node):
            continue  # made once, outside of any declaration
        assert node.loc.file == str(drawn.path), (node, node.loc)
        assert 0 < node.loc.line <= len(lines), (node, node.loc)


def clauses(mask: MaskForm, env: Env) -> Named:
    """The clauses of a mask as a truth value."""
    false: Node = Lit(False)
    total = false
    for clause in mask.clauses:
        all_of: Node = Lit(True)
        for band in clause.bands:
            t = Map(Fn.MUL, (Lit(band.t), Index("T")))
            s = Map(Fn.MUL, (Lit(band.s), Index("S")))
            value = Map(Fn.ADD, (Map(Fn.ADD, (t, s)), band.offset))
            all_of = Map(Fn.AND, (all_of, Map(Fn.GE, (value, Lit(0)))))
        for residual in clause.residual:
            all_of = Map(Fn.AND, (all_of, residual))
        total = Map(Fn.OR, (total, all_of))
    return evaluate(total, env)


@examples(100)
@given(folds(), randoms())
def test_the_clauses_of_a_mask_are_the_mask(drawn: Drawn, r):
    t = r.choice((0, 1, 4, 9))
    s = max(t + r.choice((0, 1, 7, -2)), 0)
    sizes = {**dict(drawn.sizes), "B": 1, "T": t, "S": s}
    tensors = arguments(r, drawn, Point(1, t, s), torch.float64, whole=True)
    program = drawn.op.declaration.trace(frozenset(tensors), sizes)
    env = Env(sizes, {}, torch.float64, torch.device("cpu"), query_offset(program, sizes))
    for tensor in program.tensors:
        value = tensors[tensor.name]
        data = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        axes = () if tensor.scalar else tensor.pattern.axes
        env.inputs[tensor.name] = unpack(data, tensor.pattern, sizes) if axes else Named(data, ())
    for node in walk(*program.roots):
        if isinstance(node, Softmax) and node.where is not None:
            want, got = evaluate(node.where, env), clauses(find_mask(node.where), env)
            axes = union(want.axes, got.axes)
            assert torch.equal(*torch.broadcast_tensors(want.aligned(axes), got.aligned(axes)))
