"""The torch lowering of any call: which of its forms runs."""

from __future__ import annotations

from attncc.codegen.forms import Analysis
from attncc.runtime.call import Call
from attncc.runtime.eager import affine, scan, softmax
from attncc.runtime.eager.pieces import pieces


def run(call: Call, analysis: Analysis, *, chunk: int = 64, round_operands: bool = False) -> None:
    """Run a bound call and write its outputs.

    Args:
        call: the call; its caches receive ``new_rows``.
        analysis: what its program is. A scan without an affine form runs token by token, anything
            else that has no form (top-k) through the evaluator in blocks of queries.
        chunk: tokens of a chunk of the affine form.
        round_operands: of the affine form, see :func:`attncc.runtime.eager.affine.run`.

    Raises:
        CacheError: a cache has no room; nothing is written.
    """
    if analysis.softmax is not None:
        softmax.run(call, analysis.softmax)
    elif analysis.affine is not None:
        affine.run(call, analysis.affine, chunk=chunk, round_operands=round_operands)
    elif call.program.scan is not None:
        scan.run(call)
    else:
        for piece in pieces(call):
            softmax.run_rows(piece, ())
