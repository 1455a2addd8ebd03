"""The scan family on the CPU: generated kernels against the interpreter in fp64.

The tolerance is the contract's. The eager reference behind it goes token by token in fp32 and
rounds what the chunked kernel rounds: the state where it is read, each row's update, each result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

import attncc.dsl.api as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.interp import interpret
from attncc.dsl.ir import Program
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.runtime import affine
from attncc.runtime.call import Call
from tests.codegen.affine_table import run_table

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Outcome:
    """Results of one call by name, and what was run."""

    results: dict[str, torch.Tensor]
    kinds: tuple[str, ...]


def pattern_of(program: Program, name: str, packed: bool) -> Pattern:
    found = {t.name: t.pattern for t in program.tensors} | {o.name: o.pattern for o in program.outputs}
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
        else torch.full(shape(patterns[n], sizes), nan, dtype=tensors.get(n, torch.empty(0, dtype=state_dtype)).dtype)
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
    affine.run(call, analyse(program), spec, phase)
    kind = [type(v[1]).__name__ for k, v in affine._FOUND.items() if k[0] == id(program)]
    return Outcome({**outputs, **finals}, tuple(kind))


Runner = Callable[[Program, Tensors, dict[str, int]], dict[str, torch.Tensor]]


def oracle(program: Program, tensors: Tensors, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    found = interpret(program, tensors, sizes)
    return {**found.states, **found.outputs}


def eager(program: Program, tensors: Tensors, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """fp32, with operands of products rounded as the kernel rounds them."""
    form = analyse(program).affine
    dtype = next(t.dtype for n, t in tensors.items() if n not in program.state_names)
    if form is None:
        found = interpret(program, tensors, sizes, dtype=torch.float32)
        return {**found.states, **found.outputs}
    return run_table(program, form, tensors, sizes, torch.float32, lambda x: x.to(dtype).float())


def each(
    runner: Runner, op: Declaration, tensors: Tensors, sizes: dict[str, int],
    lengths: Sequence[int] | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A dense reference over packed sequences, one by one."""
    program = op.trace(frozenset(tensors), sizes)
    states = {
        n: torch.zeros(shape(program.tensor(n).pattern, {**sizes, "B": len(lengths or [0] * sizes["B"])}))
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
    rough = each(eager, op, tensors, sizes, lengths)
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
    sizes: dict[str, int], dtype: torch.dtype, lead: Sequence[int], *, state: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:  # fmt: skip
    torch.manual_seed(seed)
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
