"""Calls on made-up data, to be held to the reference: for self-checks, tuning and ``verify``.

A trial keeps what kernels are compiled for (dtypes, head dims, layouts, options) and has few and
short sequences, so that the interpreter in fp64 is the oracle, on the device of the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attncc.codegen.forms import Analysis, WindowForm
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.specialise import runtime_axes
from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.ir import Lifetime
from attncc.runtime.arrivals import forget
from attncc.runtime.backends import run_kernels
from attncc.runtime.call import Call
from attncc.runtime.draws import FEW, draw
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.pools import StatePool
from attncc.runtime.reference import run_reference
from attncc.runtime.tolerance import Judged, judge

TOKENS, HELD, SEQUENCES = 80, 48, 2
"""Of a trial: tokens, rows of history before them (multiples of 16, not of 64), sequences."""
SELECTING = 24
"""Tokens of a trial with a selection, which has more rows to pick from than it picks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a trial beside its oracle."""

    output: str
    judged: Judged


def trial_call(
    call: Call, device: torch.device | str, *, seed: int = 0, small: bool = True
) -> Call:
    """A call of the same kind on a device, with data.

    Args:
        call: any bound call; its tensors are not read.
        device: where the new one's tensors live.
        seed: of the data.
        small: with few and short sequences; else of the call's own sizes.
    """
    sizes = _small(call) if small else dict(call.sizes)
    with torch.device("cpu"):  # whatever the caller's default device is
        made = draw(call, sizes, seed, even=not small)
    return moved(made, torch.device(device))


def trial_spec(call: Call, spec: Spec) -> Spec:
    """What selects the kernels of a trial: those of the call, whose sizes may select others.

    Args:
        call: the call itself.
        spec: its own.
    """
    if not any(t.lifetime is Lifetime.STATE for t in call.program.tensors):
        return spec
    from attncc.runtime.affine import completed
    from attncc.runtime.running import running_spec

    more = *completed(call, spec).buckets, *running_spec(call, spec).buckets
    return replace(spec, buckets=(*spec.buckets, *more))


def moved(call: Call, device: torch.device) -> Call:
    """A copy of a call in other memory."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device, copy=True)

    def copies(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: copy(t) for n, t in held.items()}

    def maybe(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else copy(t)

    tensors = copies(call.tensors)
    pools = {
        n: StatePool(tensors[n], copy(p.slots), maybe(p.out_slots)) for n, p in call.pools.items()
    }
    return replace(
        call, tensors=tensors, outputs=copies(call.outputs), pools=pools,
        final_states=copies(call.final_states), new_rows=copies(call.new_rows), device=device,
        cu_seqlens=maybe(call.cu_seqlens), cu_seqlens_k=maybe(call.cu_seqlens_k),
        lengths=maybe(call.lengths), block_table=maybe(call.block_table), lse=maybe(call.lse),
        scales={n: replace(own, tensor=copy(own.tensor)) for n, own in call.scales.items()},
    )  # fmt: skip


def as_kernels(analysis: Analysis) -> Analysis:
    """The analysis with which the torch lowering takes the kernels' way.

    It loops over tokens where the kernels step, so that both round alike.
    """
    carries = analysis.carries
    if analysis.affine is not None or carries is None:
        return analysis
    windows = all(isinstance(f, WindowForm) for f in carries.forms)
    return analysis if windows else replace(analysis, carries=None)


def results_of(call: Call) -> dict[str, torch.Tensor]:
    """What a call has written, by name; of pools the sequences' states."""
    found = {**call.final_states, **call.outputs}
    if call.lse is not None:
        found["lse"] = call.lse
    for name, pool in call.pools.items():
        last = pool.written[:, -1] if pool.each_token else pool.written
        found[name] = StatePool(pool.pool, last).read(call.patterns[name])
    return found


def compare(call: Call, spec: Spec, phase: str, parts: int | None = None) -> list[Finding]:
    """Run a call's kernels on NaN-filled results and judge every one of them.

    Args:
        call: a trial; its caches and pools change.
        spec: what selects its kernels.
        phase: ``prefill`` or ``decode``.
        parts: ranges of keys or segments that sequences are cut into; None leaves it to the call.

    Raises:
        RefusedError: no kernel covers the call.
    """
    analysis = analyse(call.program)
    plain = moved(call, call.device)
    exact = run_reference(plain)
    run_eager(plain, as_kernels(analysis), round_operands=True)
    rough = results_of(plain)
    for tensor in (*call.outputs.values(), *call.final_states.values(), call.lse):
        if tensor is not None and tensor.is_floating_point():
            tensor.fill_(float("nan"))
    try:
        run_kernels(call, analysis, spec, phase, parts=parts)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
    except Exception:
        forget()
        raise
    found = [
        Finding(name, judge(tensor, exact[name], rough[name], tensor.dtype))
        for name, tensor in results_of(call).items()
    ]
    copied = call.new_rows.keys() - call.scales.keys()  # e4m3 is judged by what is read from it
    found += [_appended(call, plain, name) for name in sorted(copied)]
    if not all(f.judged.right for f in found):
        forget()  # what counted wrong must not make the next trial wrong
    return found


def _appended(call: Call, plain: Call, name: str) -> Finding:
    """A history after the call: rows are copied, so they are equal bit for bit."""
    got, want = call.tensors[name], plain.tensors[name]
    same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    return Finding(f"{name} (appended)", Judged(0.0 if same else float("inf"), 0.0))


# --- sizes -----------------------------------------------------------------------------------


def _small(call: Call) -> dict[str, int]:
    """The call's sizes with few sequences, tokens and rows of history.

    Where rows are picked, there are more of them than are picked; of packed prompts without a
    cache, whose rows are the tokens themselves, all are.
    """
    sizes = dict(call.sizes)
    shown = {a for o in call.program.outputs for a in o.pattern.axes}
    states = {a for n in call.program.state_names for a in call.program.tensor(n).pattern.axes}
    for axis in runtime_axes(call.program):
        if axis in sizes and axis not in {*shown, *states, "B", "T", "S"}:
            sizes[axis] = min(sizes[axis], TOKENS)
    sizes["B"] = min(call.sizes["B"], SEQUENCES)
    tokens = call.sizes.get("T", 1)
    each = tokens / max(call.sizes["B"], 1) if call.packed else tokens
    few = each <= FEW
    selected = analyse(call.program).selected
    most = TOKENS if selected is None else SELECTING
    held = HELD if selected is None else HELD + -(-selected.selection.node.k // 16) * 16
    if "T" in sizes:
        sizes["T"] = max(int(each), 1) * (sizes["B"] if call.packed else 1) if few else most
    if "S" in sizes:
        own = int(each) if few and call.packed else sizes.get("T", 1)
        sizes["S"] = -(-own // 16) * 16 + held
        if call.lengths is None and call.packed:
            sizes["S"] = sizes["T"] if call.cu_seqlens_k is None else sizes["S"] * sizes["B"]
        elif call.lengths is None and call.sizes["S"] == tokens and selected is None:
            sizes["S"] = sizes["T"]
    if call.block_table is not None:
        each_row = -(-sizes["S"] // sizes[PAGE])
        sizes[PAGES] = sizes["B"] * each_row + 2
        sizes["S"] = each_row * sizes[PAGE]
    return sizes
