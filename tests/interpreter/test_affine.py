"""The scan family on the CPU: generated kernels against the interpreter in fp64.

The tolerance is the contract's. The eager reference behind it works in chunks, in fp32, and rounds
the operands of products to the storage type where the kernels do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

import attncc.dsl.api as ac
from attncc.codegen.affine_checks import decays_each
from attncc.codegen.forms import AffineForm
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.interp import Env, evaluate, interpret, pack, unpack
from attncc.dsl.ir import Program
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.runtime import affine
from attncc.runtime.call import Call
from attncc.runtime.eager.affine import advance
from tests.codegen.affine_table import Chunks

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Outcome:
    """Results of one call by name, and what was run."""

    results: dict[str, torch.Tensor]
    kinds: tuple[str, ...]


def pattern_of(program: Program, name: str, packed: bool) -> Pattern:
    found = {t.name: t.pattern for t in program.tensors} | {
        o.name: o.pattern for o in program.outputs
    }
    pattern = found[name]
    return pattern.without("B") if packed and "T" in pattern.axes else pattern


def shape(pattern: Pattern, sizes: Mapping[str, int]) -> list[int]:
    found = []
    for dim in pattern.dims:
        n = 1
        for axis in dim:
            n *= sizes[axis]
        found.append(n)
    return found


def run(
    op: Declaration, tensors: Tensors, sizes: dict[str, int], lengths: Sequence[int] | None = None,
    *, phase: str = "prefill", state_dtype: torch.dtype = torch.float32, in_place: bool = False,
    segments: int | None = None,
) -> Outcome:  # fmt: skip
    """Run the generated kernels; packed where ``lengths`` says so."""
    program = op.trace(frozenset(tensors), sizes)
    packed = lengths is not None
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *torch.tensor([*lengths]).cumsum(0)], dtype=torch.int32)
        sizes = {**sizes, "B": len(lengths), "T": int(sum(lengths))}
    dtype = next(t.dtype for n, t in tensors.items() if n not in program.state_names)
    patterns = {
        n: pattern_of(program, n, packed)
        for n in (*(t.name for t in program.tensors), *(o.name for o in program.outputs))
    }
    nan = float("nan")
    outputs = {
        o.name: torch.full(shape(patterns[o.name], sizes), nan, dtype=dtype)
        for o in program.outputs
    }
    finals = {
        n: tensors[n].clone()
        if in_place
        else torch.full(
            shape(patterns[n], sizes),
            nan,
            dtype=tensors.get(n, torch.empty(0, dtype=state_dtype)).dtype,
        )
        for n in program.state_names
    }
    given = {**tensors, **finals} if in_place else dict(tensors)
    call = Call(
        program, given, {}, patterns, sizes, dtype, torch.device("cpu"), outputs, finals, cu
    )
    spec = Spec(
        dtypes=tuple((n, NAMES[t.dtype]) for n, t in {**given, **finals, **outputs}.items()),
        static=tuple((a, n) for a, n in sizes.items() if a not in ("B", "T", "H", "Hk")),
        packed=packed,
        given_states=frozenset(n for n in program.state_names if n in tensors),
    )
    affine._FOUND.clear()
    affine.run(call, analyse(program), spec, phase, segments=segments)
    kind = [type(chosen).__name__ for chosen in affine._FOUND.values()]
    return Outcome({**outputs, **finals}, tuple(kind))


Runner = Callable[[Program, Tensors, dict[str, int]], dict[str, torch.Tensor]]


def oracle(program: Program, tensors: Tensors, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    found = interpret(program, tensors, sizes)
    return {**found.states, **found.outputs}


def in_chunks(
    program: Program, form: AffineForm, tensors: Tensors, sizes: dict[str, int], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The eager implementation, with operands of products rounded."""
    named = {n: unpack(t.float(), program.tensor(n).pattern, sizes) for n, t in tensors.items()}
    state = named.pop(form.state)
    env = Env(sizes, named, torch.float32, torch.device("cpu"))
    state = advance(env, form, state, "T", 64, dtype)
    found = {form.state: pack(state, program.tensor(form.state).pattern, sizes)}
    for o, node in zip(program.outputs, form.outputs, strict=True):
        found[o.name] = pack(evaluate(node, env), o.pattern, sizes)
    return found


def eager(stepwise: bool) -> Runner:
    """fp32, with operands of products rounded as the chunked kernels round them."""

    def runner(
        program: Program, tensors: Tensors, sizes: dict[str, int]
    ) -> dict[str, torch.Tensor]:
        form = analyse(program).affine
        if form is None or stepwise or not sizes["T"]:
            found = interpret(program, tensors, sizes, dtype=torch.float32)
            return {**found.states, **found.outputs}
        dtype = next(t.dtype for n, t in tensors.items() if n not in program.state_names)
        if decays_each(form):
            return in_chunks(program, form, tensors, sizes, dtype)
        return Chunks(program, form, sizes, lambda x: x.to(dtype).float()).run(tensors)

    return runner


def each(
    runner: Runner, op: Declaration, tensors: Tensors, sizes: dict[str, int],
    lengths: Sequence[int] | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A dense reference over packed sequences, one by one."""
    program = op.trace(frozenset(tensors), sizes)
    states = {
        n: torch.zeros(
            shape(program.tensor(n).pattern, {**sizes, "B": len(lengths or [0] * sizes["B"])})
        )
        for n in program.state_names
    }
    tensors = {**states, **tensors}
    if lengths is None:
        return runner(program, tensors, sizes)
    parts: dict[str, list[torch.Tensor]] = {}
    start = 0
    for b, n in enumerate(lengths):
        one = {}
        for name, tensor in tensors.items():
            pattern = program.tensor(name).pattern
            if "T" in pattern.axes:
                rows = tensor.shape[0] // sum(lengths) if sum(lengths) else 1
                one[name] = tensor[start * rows : (start + n) * rows].unsqueeze(0)
            else:
                one[name] = tensor[b : b + 1] if "B" in pattern.axes else tensor
        for name, value in runner(program, one, {**sizes, "B": 1, "T": n}).items():
            parts.setdefault(name, []).append(value if name in states else value.squeeze(0))
        start += n
    return {name: torch.cat(values) for name, values in parts.items()}


def check(
    op: Declaration, tensors: Tensors, sizes: dict[str, int], lengths: Sequence[int] | None = None,
    **options: object,
) -> Outcome:  # fmt: skip
    found = run(op, tensors, sizes, lengths, **options)  # type: ignore[arg-type]
    want = each(oracle, op, tensors, sizes, lengths)
    rough = each(eager(found.kinds == ("Stepwise",)), op, tensors, sizes, lengths)
    for name, value in found.results.items():
        exact = want[name]
        rounded = rough[name].to(value.dtype).double()
        assert torch.equal(value.isnan(), exact.isnan()), name
        if not exact.numel():
            continue
        eps = torch.finfo(value.dtype).eps
        allowed = 2 * ((rounded - exact).abs().max() + eps * exact.abs().max())
        error = (value.double() - exact).abs().max()
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"
    return found


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)


def delta_inputs(
    sizes: dict[str, int], dtype: torch.dtype, lead: Sequence[int], *, state: bool = True
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    hk, hv, k, v = sizes["Hk"], sizes["Hk"] * sizes["G"], sizes["K"], sizes["V"]
    found = {
        "q": unit(torch.randn(*lead, hk, k)).to(dtype),
        "k": unit(torch.randn(*lead, hk, k)).to(dtype),
        "v": torch.randn(*lead, hv, v).to(dtype),
        "g": torch.nn.functional.logsigmoid(torch.randn(*lead, hv)),
        "beta": torch.rand(*lead, hv),
    }
    if state:
        found["s"] = torch.randn(sizes["B"], hv, k, v)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gated_delta_rule_over_packed_sequences_with_empty_ones(dtype: torch.dtype) -> None:
    lengths = [0, 1, 33, 0, 65, 0]
    sizes = {"B": 6, "T": 99, "Hk": 1, "G": 2, "K": 32, "V": 64}
    tensors = delta_inputs(sizes, dtype, [99])
    found = check(gated_delta_rule, tensors, sizes, lengths)
    assert found.kinds == ("Chunked",)
    for empty in (0, 3, 5):
        assert torch.equal(found.results["s"][empty], tensors["s"][empty])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("segments", [2, 3])
def test_segments_of_packed_sequences_are_composed_in_order(
    dtype: torch.dtype, segments: int
) -> None:
    lengths = [0, 1, 130, 0, 300, 0]
    # fp32 takes A in pieces; of 16 bits a program has a part of a tile's columns.
    k, v = (64, 48) if dtype == torch.float32 else (32, 64)
    sizes = {"B": 6, "T": 431, "Hk": 1, "G": 2, "K": k, "V": v}
    tensors = delta_inputs(sizes, dtype, [431])
    tensors["g"] = tensors["g"] / 16  # so that states survive a segment
    found = check(gated_delta_rule, tensors, sizes, lengths, segments=segments, in_place=True)
    for empty in (0, 3, 5):
        assert torch.equal(found.results["s"][empty], tensors["s"][empty])


def test_segments_without_a_state_and_without_gates() -> None:
    sizes = {"B": 2, "T": 200, "Hk": 1, "G": 1, "K": 48, "V": 32}
    tensors = delta_inputs(sizes, torch.float32, [2, 200], state=False)
    check(gated_delta_rule, tensors, sizes, segments=2)
    del tensors["g"]
    check(gated_delta_rule, tensors, sizes, segments=3)


@pytest.mark.parametrize("length", [0, 1, 65, 130])
def test_gated_delta_rule_over_dense_sequences(length: int) -> None:
    sizes = {"B": 2, "T": length, "Hk": 2, "G": 1, "K": 32, "V": 32}
    tensors = delta_inputs(sizes, torch.bfloat16, [2, length], state=False)
    del tensors["g"]  # DeltaNet
    found = check(gated_delta_rule, tensors, sizes)
    assert found.kinds == (("Chunked",) if length > 8 else ("Stepwise",))
    check(gated_delta_rule, {k: t[:0] for k, t in tensors.items()}, {**sizes, "B": 0})


@ac.op(scan="T", out="B T H V")
def gated_delta_product(
    q=ac.Activation("B T H K"), k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H", default=0), beta=ac.Activation("B (T N) H", default=1),
    s=ac.State("B H V K"),
):  # fmt: skip
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@pytest.mark.parametrize("rows", [2, 3])
def test_several_rows_a_token_share_one_decay_and_the_state_may_be_transposed(rows: int) -> None:
    sizes = {"B": 3, "T": 75, "N": rows, "H": 2, "K": 48, "V": 32}
    torch.manual_seed(1)
    tensors = {
        "q": unit(torch.randn(75, 2, 48)).bfloat16(),
        "k": unit(torch.randn(75 * rows, 2, 48)).bfloat16(),
        "v": torch.randn(75 * rows, 2, 32).bfloat16(),
        "g": torch.nn.functional.logsigmoid(torch.randn(75, 2)),
        "beta": torch.rand(75 * rows, 2),
        "s": torch.randn(3, 2, 32, 48).bfloat16(),
    }
    assert check(gated_delta_product, tensors, sizes, [40, 0, 35]).kinds == ("Chunked",)
    check(gated_delta_product, tensors, sizes, [40, 0, 35], segments=2)


def test_gdp_of_the_public_example() -> None:  # a17
    sizes = {"B": 1, "T": 1, "N": 2, "H": 1, "K": 8, "V": 8}
    k = torch.eye(8)[:2].reshape(1, 2, 1, 8)
    v = torch.arange(16.0).reshape(1, 2, 1, 8)
    tensors = {
        "q": k.sum(1, keepdim=True) * 8**0.5, "k": k, "v": v,
        "g": torch.full((1, 1, 1), 0.5).log(), "s": torch.ones(1, 1, 8, 8),
    }  # fmt: skip
    found = check(gated_delta_product, tensors, sizes)
    torch.testing.assert_close(found.results["o"].flatten(), torch.arange(8.0, 23.0, 2.0))


@ac.op(scan="T", out={"o": "B T H V", "p": "B T H V"})
def mixed(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), a=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"), w=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """Reads before the decay, two rows, a write before the decay, and two read-outs."""
    early = ac.dot(s, q, "K")
    s = s + k * v
    s = w * s - a * ac.dot(s, k, "K")
    return s, early, ac.dot(s, q, "K") + v


def test_reads_and_writes_before_and_after_the_decay() -> None:
    torch.manual_seed(2)
    sizes = {"B": 2, "T": 65, "H": 1, "K": 32, "V": 32}
    vectors = {n: unit(torch.randn(2, 65, 1, 32)) for n in "qkav"}
    vectors["w"] = torch.rand(2, 65, 1) * 2 - 1  # decays of either sign
    vectors["w"][:, 40] = 0.0
    assert check(mixed, vectors, sizes).kinds == ("Chunked",)


@ac.op(scan="T", out="B T (H G) V")
def linear_attention(
    q=ac.Activation("B T (H G) K"), k=ac.Activation("B T (H G) K"), v=ac.Activation("B T (H G) V"),
    s=ac.State("B (H G) K V"),
):  # fmt: skip
    s = s + k * v
    return s, ac.dot(s, q, "K")


def test_linear_attention_has_nothing_to_solve() -> None:
    torch.manual_seed(3)
    sizes = {"B": 1, "T": 70, "H": 1, "G": 2, "K": 32, "V": 32}
    tensors = {n: torch.randn(1, 70, 2, 32).half() for n in "qkv"}
    assert check(linear_attention, tensors, sizes).kinds == ("Chunked",)
    assert check(linear_attention, tensors, sizes, segments=2).kinds == ("Chunked",)


@ac.op(scan="T", out="B T (G H) P")
def mamba2(
    x=ac.Activation("B T (G H) P"), b=ac.Activation("B T G N"), c=ac.Activation("B T G N"),
    dt=ac.Activation("B T (G H)"), a=ac.Param("(G H)"), d=ac.Param("(G H)"),
    s=ac.State("B (G H) P N"),
):  # fmt: skip
    dt = ac.softplus(dt)
    s = ac.exp(dt * a) * s + b * (dt * x)
    return s, ac.dot(s, c, "N") + d * x


def test_heads_that_share_vectors_and_layouts_of_strides() -> None:
    torch.manual_seed(6)
    sizes = {"B": 2, "T": 70, "G": 2, "H": 2, "P": 40, "N": 20}
    tensors = {
        "x": torch.randn(2, 4, 70, 64).transpose(1, 2)[..., 8:48].bfloat16(),
        "b": torch.randn(2, 70, 2, 20).bfloat16(), "c": torch.randn(2, 70, 2, 20).bfloat16(),
        "dt": torch.randn(2, 70, 4), "a": -torch.rand(4), "d": torch.randn(4),
    }  # fmt: skip
    assert check(mamba2, tensors, sizes).kinds == ("Chunked",)
    check(mamba2, tensors, sizes, segments=2)  # the decay of a segment is a number


@ac.op(scan="T", out="B T H V")
def kimi_delta(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def gated_linear(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [kimi_delta, gated_linear], ids=lambda op: op.name)
def test_decays_per_key_are_inside_the_operands(op: Declaration, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    lengths = [0, 70, 1, 130]
    sizes = {"B": 4, "T": 201, "H": 2, "K": 48, "V": 32}
    tensors = {n: unit(torch.randn(201, 2, 48)).to(dtype) for n in "qk"}
    tensors |= {"v": torch.randn(201, 2, 32).to(dtype), "s": torch.randn(4, 2, 48, 32)}
    tensors["g"] = torch.nn.functional.logsigmoid(torch.randn(201, 2, 48) + 2)
    tensors["g"][40:44] = -torch.inf  # everything before is forgotten
    tensors["g"][90] *= 50
    if op is kimi_delta:
        tensors["beta"] = torch.rand(201, 2)
    assert check(op, tensors, sizes, lengths).kinds == ("Chunked",)
    check(op, tensors, sizes, lengths, segments=2)


@ac.op(scan="T", out="B T H V")
def bounded(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    w=ac.Activation("B T H K"), b=ac.Param("H"), s=ac.State("B H K V"), z=ac.State("B H K"),
):  # fmt: skip
    """Not affine, two states, a decay per key axis, and a sum that padding must not enter."""
    s = ac.tanh(w * s + k * v)
    z = z + ac.exp(k)
    return s, z, (ac.dot(s, q, "K") + b) / ac.sum(z, "K")


def test_a_body_that_is_not_affine_runs_stepwise() -> None:
    torch.manual_seed(4)
    sizes = {"B": 3, "T": 18, "H": 2, "K": 24, "V": 40}
    tensors = {n: torch.randn(18, 2, 40 if n == "v" else 24) for n in "qkvw"}
    tensors["b"] = torch.randn(2)
    assert check(bounded, tensors, sizes, [9, 0, 9]).kinds == ("Stepwise",)


@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_steps_in_place(tokens: int) -> None:
    sizes = {"B": 2, "T": tokens, "Hk": 2, "G": 2, "K": 64, "V": 64}
    tensors = delta_inputs(sizes, torch.bfloat16, [2, tokens])
    found = check(gated_delta_rule, tensors, sizes, phase="decode", in_place=True)
    assert found.kinds == ("Stepwise",)


def test_chunks_may_write_the_final_state_over_the_initial_one() -> None:
    sizes = {"B": 1, "T": 64, "Hk": 1, "G": 1, "K": 32, "V": 64}
    check(gated_delta_rule, delta_inputs(sizes, torch.bfloat16, [1, 64]), sizes, in_place=True)


def hard(beta: float, gates: torch.Tensor, *, value: float = 1.0) -> dict[str, torch.Tensor]:
    """One key repeated, q = k."""
    length = len(gates)
    key = unit(torch.arange(1.0, 33.0)).expand(1, length, 1, 32)
    torch.manual_seed(5)
    return {
        "q": key.clone(), "k": key.clone(), "v": value * torch.randn(1, length, 1, 32),
        "g": gates.reshape(1, length, 1).float(), "beta": torch.full((1, length, 1), beta),
        "s": torch.ones(1, 1, 32, 32),
    }  # fmt: skip


@pytest.mark.parametrize("case", ["a10", "a11", "a14", "a16", "a34"])
def test_gates_and_betas_of_public_reports(case: str) -> None:
    gates = torch.zeros(33 if case == "a34" else 64)
    beta = {"a14": 1.0, "a16": 2.0}.get(case, 0.7)
    if case == "a10":
        gates += torch.tensor(1e-12).log()
    if case == "a11":
        gates[31] = -torch.inf
    tensors = hard(beta, gates, value=0.0 if case == "a16" else 1.0)
    sizes = {"B": 1, "T": len(gates), "Hk": 1, "G": 1, "K": 32, "V": 32}
    found = check(gated_delta_rule, tensors, sizes).results
    if case == "a14":  # o = scale v
        torch.testing.assert_close(found["o"], tensors["v"] * 32**-0.5, rtol=0, atol=2e-5)
    if case == "a16":  # the component along k flips
        along = found["o"].flatten(1)
        torch.testing.assert_close(along[:, 32:], -along[:, :-32], rtol=0, atol=1e-4)
