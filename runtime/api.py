"""Ops: a declaration with the methods that run it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attncc.dsl.build import Declaration, declare
from attncc.dsl.errors import ArgumentError
from attncc.dsl.text import program_text
from attncc.runtime import backends
from attncc.runtime.arguments import Options
from attncc.runtime.bind import bind
from attncc.runtime.caches import Cache
from attncc.runtime.call import Call
from attncc.runtime.partials import partial_of
from attncc.runtime.reference import run_reference


class Op:
    """One declared op: call it, or ask for its reference, source or explanation.

    Every call takes, besides the op's own arguments: ``cu_seqlens`` (packed sequences),
    ``cu_seqlens_k``, ``cache`` (a :class:`DenseCache` or a :class:`PagedCache`), ``out`` (a tensor,
    or a mapping by result name), ``return_lse``,
    ``return_partial`` (a :class:`Partial` of one softmax fold, without its sink, for
    :func:`attncc.merge`), ``backend`` (``auto``, ``reference``, ``torch``,
    ``triton``) and ``sizes`` (axes that no argument fixes). It returns states, then outputs, in the
    body's order: a tensor if there is one result, else a named tuple.

    Without ``cache`` the histories (k, v) are whole and nothing is written; with it they are the
    new tokens, which are appended first. A state may be given as a tensor, which is only read, or
    as a :class:`StatePool`, which is updated in place and does not come back. Lengths, block tables
    and slots stay on the device, so that a warmed-up call can be captured in a CUDA graph and
    replayed after they have changed in place.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.__name__ = declaration.name
        self.__doc__ = declaration.doc
        self._kinds: dict[tuple[str, ...], Any] = {}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{t.name}[{t.pattern}]" for t in self.declaration.tensors)
        return f"<op {self.declaration.name}({arguments})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op; see the class for the options.

        Raises:
            CallError: an argument does not fit the declaration; nothing was written.
            BackendError: a backend named explicitly cannot run this call.
        """
        return self._run("prefill", args, kwargs)

    prefill = __call__

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """One or a few tokens a sequence; the last positional argument may be the cache.

        Lengths are before the append, and S after it. Several tokens are masked as the tail of the
        history (causal is bottom-right aligned); in scans each may have a slot for the state after
        it (``StatePool(pool, slots, out_slots)`` with out-slots ``[B, T]``).
        """
        if args and isinstance(args[-1], Cache):
            if kwargs.get("cache") is not None:
                raise ArgumentError("given twice", op=self.declaration.name, argument="cache")
            args, kwargs = args[:-1], {**kwargs, "cache": args[-1]}
        return self._run("decode", args, kwargs)

    def reference(self, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Any:
        """The interpreter's result, fp64 or fp32, unrounded; a cache is read only."""
        call, options = bind(self.declaration, args, kwargs)
        return self._results(call, run_reference(call, dtype), options)

    def _run(self, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call, options = bind(self.declaration, args, kwargs)
        backends.run(call, phase, options.backend)
        self._grow(call, options)
        named = {**call.final_states, **call.outputs}
        if call.lse is not None:
            named["lse"] = call.lse
        return self._results(call, named, options)

    def _grow(self, call: Call, options: Options) -> None:
        if options.cache is None:
            return
        if call.cu_seqlens is None:
            options.cache.lengths.add_(call.sizes["T"])
        else:
            options.cache.lengths.add_(call.cu_seqlens[1:] - call.cu_seqlens[:-1])

    def _results(self, call: Call, named: Mapping[str, torch.Tensor], options: Options) -> Any:
        if options.return_partial:
            return partial_of(call, named)
        names = [*call.final_states, *call.outputs]
        if call.lse is not None:
            names.append("lse")
        if len(names) == 1:
            return named[names[0]]
        kind = self._kinds.get(tuple(names))
        if kind is None:
            name = f"{self.declaration.name}_result"
            kind = self._kinds[tuple(names)] = namedtuple(name, names)
        return kind(*(named[n] for n in names))

    def text(self, given: frozenset[str] | None = None) -> str:
        """Canonical text of the traced program."""
        return program_text(self.declaration.trace(given))

    def source(self, target: str = "sm_90", **kwargs: Any) -> dict[str, str]:
        """Generated Triton source by kernel name.

        Args:
            target: ``sm_90`` and the like.
            **kwargs: as :func:`attncc.runtime.backends.sources`: ``phase``, ``dtype``, ``sizes``,
            ``packed``.
        """
        found = backends.sources(self.declaration, target=target, **kwargs)
        return {s.entry: s.text for s in found}

    def explain(self, **kwargs: Any) -> str:
        """Program, forms, plans and refusals, as text for people."""
        return backends.explain(self.declaration, **kwargs)


def op(
    *, out: str | Mapping[str, str], scan: str | None = None
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op.

    Args:
        out: the output's layout, for instance ``"B T (Hkv G) E"``, or layouts by name.
        scan: the axis whose one step the body is; without it the body sees whole histories.

    Raises:
        DeclarationError: signature or body have no meaning; all mistakes are reported at once.
    """

    def wrap(fn: Callable[..., Any]) -> Op:
        return Op(declare(fn, out=out, scan=scan))

    return wrap
