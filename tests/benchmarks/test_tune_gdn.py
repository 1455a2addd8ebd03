"""What variants of the gated delta rule are held to before they are timed."""

import torch

from benchmarks import tune_gdn
from benchmarks.groups import recur


def test_results_are_held_to_the_oracle_sequence_by_sequence() -> None:
    x = recur.inputs_of(1, 96, 2, 4, 32, 32, torch.device("cpu"))
    x |= {"s": torch.zeros(3, 4, 32, 32), "cu_seqlens": torch.tensor([0, 32, 64, 96])}
    results = dict(recur.call(x, "torch", "prefill").fn())
    assert tune_gdn.unlike(results, x) == ""
    for name, wrong in (("o", results["o"] * 1.1), ("s", results["s"].roll(1, 0))):
        assert tune_gdn.unlike({**results, name: wrong}, x).startswith(f"{name} errs by")
    lost = {**results, "s": torch.full_like(results["s"], torch.nan)}
    assert "inf" in tune_gdn.unlike(lost, x)
