"""Ops: a declaration with the methods that run it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attncc.dsl.build import Declaration, declare
from attncc.dsl.errors import ArgumentError
from attncc.dsl.ledger import Ledger
from attncc.dsl.text import program_text
from attncc.runtime import growth
from attncc.runtime.arguments import Options
from attncc.runtime.bind import bind
from attncc.runtime.caches import DenseCache, PagedCache
from attncc.runtime.call import Call
from attncc.runtime.dispatch import Repeated
from attncc.runtime.owners.allocation import Allocation, allocate
from attncc.runtime.partials import partial_of
from attncc.runtime.prepared import Prepared, prepare
from attncc.runtime.reference import run_reference
from attncc.runtime.registry import enrol
from attncc.runtime.tables import grow


class Op:
    """One declared op: call it, or ask for its reference, source or explanation.

    Every call takes, besides the op's own arguments: ``cu_seqlens`` (packed sequences),
    ``cu_seqlens_k`` (whole packed histories), ``cache`` (a :class:`DenseCache` or a
    :class:`PagedCache`), ``out`` (a tensor, or a mapping by result name), ``return_lse``,
    ``return_partial`` (a :class:`Partial` of one softmax fold, without its sink, for
    :func:`attncc.merge`), ``backend`` (``auto``, ``reference``, ``torch``, ``triton``, ``gluon``,
    ``cutedsl``, ``cudnn``) and ``sizes`` (axes that no argument fixes). It returns states, then
    outputs, in the body's order: a tensor if there is one result, else a named tuple.

    Without ``cache`` the histories (k, v) are whole and nothing is written; with it they are the
    new tokens, which are appended first. What a history is stored as is the cache's affair
    (``DenseCache.allocate(..., dtype=ac.Quantised())``); a whole history may be a
    :class:`QuantisedTensor`. A state may be given as a tensor, which is only read, or
    as a :class:`StatePool`, which is updated in place and does not come back. Lengths, block tables
    and slots stay on the device, so that a warmed-up call can be captured in a CUDA graph and
    replayed after they have changed in place.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.__name__ = declaration.name
        self.__doc__ = declaration.doc
        self._kinds: dict[tuple[str, ...], Any] = {}
        self._repeated = Repeated()
        self.token = enrol(self)

    def __deepcopy__(self, memo: Any) -> Op:
        return self  # nothing about it changes, and a copied model runs the same custom ops

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
        return self._run("decode", *self._with_cache(args, kwargs))

    def _with_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[-1], (DenseCache, PagedCache)):
            if kwargs.get("cache") is not None:
                raise ArgumentError("given twice", op=self.declaration.name, argument="cache")
            return args[:-1], {**kwargs, "cache": args[-1]}
        return args, kwargs

    def prepare(self, *args: Any, phase: str = "prefill", **kwargs: Any) -> Prepared:
        """Run a call once, and keep what repeating it at little cost to the host needs.

        This is a real call: a cache grows, and pools and ``out`` are written.

        Args:
            *args: as of a call.
            phase: ``prefill`` or ``decode``.
            **kwargs: as of a call.

        Returns:
            The call, to be called with what takes other arguments' places.

        Raises:
            CallError: as a call.
            BackendError: the call cannot be prepared, and why; nothing was written.
        """
        if phase == "decode":
            args, kwargs = self._with_cache(args, kwargs)
        elif phase != "prefill":
            raise ArgumentError(
                "no such phase", op=self.declaration.name, argument="phase",
                expected="prefill or decode", found=phase,
            )  # fmt: skip
        return prepare(self, phase, args, kwargs)

    def reference(self, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Any:
        """The interpreter's result, fp64 or fp32, unrounded; a cache is read only."""
        call, options = bind(self.declaration, args, kwargs)
        return self._results(call, run_reference(call, dtype), options)

    def with_patterns(self, out: str | Mapping[str, str] | None = None, **patterns: str) -> Op:
        """The op over other layouts, for instance a state as ``[V, K]``.

        ``ac.ops.kda.with_patterns(s="B (Hk G) V K")`` is KDA whose state has V before K, and
        ``ac.ops.gla.with_patterns(g="B T H")`` GLA with one gate a head. It is an op of its own:
        make it once and keep it.

        Args:
            out: the output's layout, or layouts by name; those not named stay.
            **patterns: layouts by argument.

        Raises:
            DeclarationError: no such argument, or the body has no meaning over these layouts.
        """
        return Op(self.declaration.with_patterns(out, **patterns))

    def ledger(
        self,
        sizes: Mapping[str, int] | None = None,
        phase: str = "decode",
        layers: int = 1,
        **options: Any,
    ) -> Ledger:
        """Every object: who makes and reads it, how long it lives, its bytes.

        See :func:`attncc.ledger`, which takes layers too.

        Raises:
            CallError: a size that is missing, unknown or none; a cache asked for in training.
            RefusedError: rows dropped that a later query may read.
        """
        from attncc.runtime.ledger import ledger

        return ledger(self, sizes, phase, layers, **options)

    def caches(self, **kwargs: Any) -> Allocation:
        """Everything the op keeps between calls, allocated; see :func:`attncc.allocate`."""
        return allocate(self.declaration, **kwargs)

    def register(self, phase: str = "prefill", **structure: Any) -> torch._ops.OpOverload:
        """The ``torch.library`` custom op of calls of one structure, defined if it is not yet.

        A traced call defines what it needs by itself; this is for a process that loads a graph
        which was traced in another one, and for calls through ``torch.ops.attncc``.

        Args:
            phase: ``prefill`` or ``decode``.
            **structure: as :class:`attncc.runtime.torch_schema.Structure`: ``cache`` (``none``,
                ``dense``, ``paged``), ``pools``, ``out``, ``sizes`` (names), ``return_lse``,
                ``return_partial``.

        Raises:
            ArgumentError, CacheError, RefusedError: no call of the op has this structure.
        """
        from attncc.runtime import torch_ops

        return torch_ops.register(self, phase, **structure)

    def _run(self, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            from attncc.runtime import torch_trace

            return torch_trace.call(self, phase, args, kwargs)
        return self.run_eager(phase, args, kwargs)

    def run_eager(self, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The call itself; also what the op's ``torch.library`` kernels run."""
        return self._repeated.run(self, phase, args, kwargs)

    def ordinary(self, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call with every check, whatever is known of earlier ones."""
        call, options = bind(self.declaration, args, kwargs)
        self.execute(call, options, phase)
        return self._results(call, call.results, options)

    def execute(self, call: Call, options: Options, phase: str) -> None:
        """Run a bound call, after which its cache holds more."""
        from attncc.runtime import backends  # the generator: not needed to import the package

        if options.cache is None:
            backends.run(call, phase, options.backend)
            return
        lengths, tokens = options.cache.lengths, call.sizes["T"]
        with growth.wanted(lengths, tokens) as grown:
            backends.run(call, phase, options.backend)
        if not grown.done:
            grow(lengths, tokens, call.cu_seqlens)

    def _results(self, call: Call, named: Mapping[str, torch.Tensor], options: Options) -> Any:
        if options.return_partial:
            return partial_of(call, named)
        names = [*call.final_states, *call.outputs]
        if call.lse is not None:
            names.append("lse")
        if len(names) == 1:
            return named[names[0]]
        return self.result_kind(tuple(names))(*(named[n] for n in names))

    def result_kind(self, names: tuple[str, ...]) -> Any:
        """The named tuple of a call with these results."""
        kind = self._kinds.get(names)
        if kind is None:
            kind = self._kinds[names] = namedtuple(f"{self.declaration.name}_result", names)
        return kind

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
        from attncc.runtime import backends

        found = backends.sources(self.declaration, target=target, **kwargs)
        return {s.entry: s.text for s in found}

    def explain(self, **kwargs: Any) -> str:
        """Program, forms, plans and refusals, as text for people."""
        from attncc.runtime import backends

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
