"""The torch lowering of any call: which of its forms runs."""

from __future__ import annotations

from attncc.codegen.forms import Analysis
from attncc.runtime.call import Call
from attncc.runtime.eager import across, carries, scan, softmax
from attncc.runtime.eager.append import append
from attncc.runtime.eager.pieces import compute_dtype, pieces
from attncc.runtime.gathered import each_token, gathered, write_pools


def run(call: Call, analysis: Analysis, *, chunk: int = 64, round_operands: bool = False) -> None:
    """Run a bound call and write its outputs.

    Args:
        call: the call; its caches receive ``new_rows``, its pools the states.
        analysis: what its program is. A scan without forms for what it carries runs token by
            token, anything else (selections) in blocks of queries.
        chunk: tokens of a chunk of the affine form.
        round_operands: of the affine form, see :func:`attncc.runtime.eager.carries.run`.

    Raises:
        CacheError, PageError: a cache has no room; nothing is written.
    """
    if call.block_table is not None or call.scales:
        append(call)
    plain = gathered(call, appended=True, dtype=compute_dtype(call))
    tokens = each_token(call)
    if analysis.softmax is not None:
        softmax.run(plain, analysis.softmax)
    elif tokens:
        scan.run(plain, tokens)
    elif analysis.carries is not None:
        carries.run(plain, analysis.carries, chunk=chunk, round_operands=round_operands)
    elif analysis.across is not None:
        across.run(plain, analysis.across, chunk=chunk, round_operands=round_operands)
    elif call.program.scan is not None:
        scan.run(plain)
    else:
        for piece in pieces(plain):
            softmax.run_rows(piece, None)
    if call.pools:
        write_pools(call, dict(plain.final_states), tokens)
