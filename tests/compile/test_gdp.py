"""``attncc.gdp`` compiled for GPUs that need not be there: what a prompt of 16 heads launches."""

import pytest

from attncc.codegen.emit.scan_sources import sources_of, split_sources
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import ChunkedPlans, plan_chunked
from attncc.runtime.adapters.gdp import _op
from attncc.runtime.inspect import Resources, resources, usage
from attncc.runtime.kernels import compile_source, load


def plans(
    rows: int, capability: int, key: int = 128, value: int = 128, packed: bool = True
) -> ChunkedPlans:
    """The chunked kernels of a call in bf16, by the plan that is chosen."""
    program = _op("Gq").declaration.trace(frozenset({"alpha", "beta", "s"}), {"N": rows})
    names = dict.fromkeys(["q", "k", "v", "o"], "bf16")
    names |= {"alpha": "fp32", "beta": "fp32", "s": "fp32"}
    spec = Spec(
        dtypes=tuple(sorted(names.items())),
        static=(("Gq", 1), ("Gv", 1), ("K", key), ("N", rows), ("V", value)),
        packed=packed,
        aligned=frozenset([*names, "s_initial", "s_final"]),
        given_states=frozenset({"s"}),
        target=f"sm_{capability}",
        buckets=(("systems", 16),),
    )
    form = analyse(program).affine
    assert form is not None
    found = plan_chunked(program, form, spec)
    assert isinstance(found, ChunkedPlans)
    return found


def compiled(rows: int, capability: int, *phases: str) -> dict[str, Resources]:
    """What the kernels of these phases need."""
    chosen = plans(rows, capability)
    found = {}
    for source in [*sources_of(chosen), *split_sources(chosen)[2:]]:
        phase = source.plan.phase
        if phase not in phases:
            continue
        kernel = compile_source(source, load(source).function, capability)
        assert "trap;" not in kernel.asm["ptx"], phase
        found[phase] = resources(kernel, f"sm_{capability}")
    assert set(found) == set(phases)
    return found


def test_blackwell_carries_the_state_on_tcgen05_without_spills() -> None:
    found = compiled(2, 100, "prepare", "mix", "state")
    cores = {phase: r.tensor_core for phase, r in found.items()}
    assert cores == {"prepare": "mma", "mix": "mma", "state": "tcgen05"}
    assert not any(r.spill_store_bytes for r in found.values()), found
    assert found["state"].shared_bytes <= 227 * 1024


def test_blackwell_cuts_long_sequences_on_tcgen05_without_spills() -> None:
    found = compiled(2, 100, "summary", "start", "local")
    assert {r.tensor_core for r in found.values()} == {"tcgen05"}
    assert not any(r.spill_store_bytes for r in found.values()), found


@pytest.mark.parametrize(("rows", "capability", "core"), [(3, 100, "tcgen05"), (2, 90, "wgmma")])
def test_the_state_passes_of_other_kinds_do_not_spill(
    rows: int, capability: int, core: str
) -> None:
    (found,) = compiled(rows, capability, "state").values()
    assert found.tensor_core == core and not found.spill_store_bytes


SIZES = [(rows, key, 128 if (rows % 2 == 0) == (key == 64) else 64)
         for rows in (1, 2, 3, 4) for key in (64, 128)]  # fmt: skip
"""Rows a token with either size of K, and each of V with both."""


def assert_no_stack(chosen: ChunkedPlans, capability: int) -> None:
    for source in sources_of(chosen):
        kernel = compile_source(source, load(source).function, capability)
        _, stack = usage(kernel.asm["cubin"], source.entry)
        assert not stack, f"{source.plan.phase}: {stack} bytes"


# The document's calls are packed.
@pytest.mark.parametrize(("rows", "key", "value"), SIZES)
def test_nothing_of_the_chosen_plan_spills(rows: int, key: int, value: int) -> None:
    assert_no_stack(plans(rows, 100, key, value), 100)


@pytest.mark.parametrize(("rows", "key", "value"), SIZES)
def test_nothing_of_a_prompt_of_its_own_spills(rows: int, key: int, value: int) -> None:
    assert_no_stack(plans(rows, 100, key, value, packed=False), 100)


# Where Gluon's kernels serve, these are those of backend="triton"; a prompt of its own puts away up
# to 40 bytes there.
@pytest.mark.parametrize(("rows", "key", "value"), SIZES)
def test_nothing_spills_on_hopper(rows: int, key: int, value: int) -> None:
    assert_no_stack(plans(rows, 90, key, value), 90)
