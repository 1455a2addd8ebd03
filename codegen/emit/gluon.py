"""Gluon's spelling of printed Triton code, and every name of Gluon that generated files use.

Element-wise code means the same in both languages: what is printed for a Triton tile is translated
word by word. What Gluon lacks, and what needs a layout of its own, stands in :data:`_OTHERS`; any
other name is an error here, never a guess. Gluon's names change between Triton's versions: those of
Triton 3.6 and 3.7 are held by :data:`IMPORTS` and looked up by :func:`missing_names`.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache

from attncc.codegen.emit.softmax_rows import Texts
from attncc.dsl.errors import RefusedError

LANGUAGE = "triton.experimental.gluon.language"
HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
AMPERE = "triton.experimental.gluon.language.nvidia.ampere"
IMPORTS: Texts = (
    "import triton.language as tl  # only for its way of saying how NaN propagates",
    "from triton.experimental import gluon",
    "from triton.experimental.gluon import language as gl",
    f"from {HOPPER} import fence_async_shared, mbarrier, tma",
    f"from {HOPPER} import warpgroup_mma, warpgroup_mma_wait",
)
"""Lines at the head of a generated file."""
ASYNC_COPY = f"from {AMPERE} import async_copy"
"""One more, where threads copy 16 bytes each to shared memory."""

TYPES = {"bf16": "gl.bfloat16", "fp16": "gl.float16", "fp32": "gl.float32"}
"""Gluon's name of an element type."""
SIGMOID: Texts = (
    "@gluon.jit",
    "def sigmoid(x):",
    "    return 1.0 / (1.0 + gl.exp(-x))",
)
"""What Gluon lacks, as lines of a generated file."""
_TERMS = (
    0.9999489784240723, -0.9962757229804993, 0.9534207582473755, -0.7705729007720947,
    0.41793787479400635, -0.10448446869850159,
)  # fmt: skip
"""q(e) for 1 / (1 + e) on [0, 1], of degree 5 with the least largest relative error, 1 / T_6(3):
1 - (1 + e) q(e) = T_6(2 e - 1) / T_6(-3), with the Chebyshev polynomial T_6."""
TANH_SERIES: Texts = (
    "@gluon.jit",
    "def tanh_series(x, inside, by):",
    '    """by tanh(x |inside| ln(2) / 2), within 5.2e-5 of its value, with one special function.',
    "",
    "    (1 - e) q(e) for (1 - e) / (1 + e) in e = 2^-|x inside|, then the sign of x; inside < 0.",
    '    """',
    "    e = gl.exp2(gl.abs(x) * inside)",
    f"    y = ({_TERMS[-1]!r} * by) * e + {_TERMS[-2]!r} * by",
    *(f"    y = y * e + {term!r} * by" for term in reversed(_TERMS[:-2])),
    "    y = gl.fma(y, -e, y)  # a factor of its own: what is small keeps its relative accuracy",
    "    return gl.inline_asm_elementwise(",
    '        "{ .reg .b32 s; and.b32 s, $1, 0x80000000; xor.b32 $0, $2, s; }",',
    '        "=r,r,r", [x, y], dtype=gl.float32, is_pure=True, pack=1',
    "    )",
)
"""tanh with one special function."""

_USED = {
    "triton.experimental.gluon._runtime": ("GluonASTSource",),
    LANGUAGE: (
        "allocate_shared_memory", "convert_layout", "num_warps", "to_tensor",
        "warp_specialize", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
        "SliceLayout", "BlockedLayout", "SwizzledSharedLayout", "associative_scan", "permute",
        "reshape", "split", "inline_asm_elementwise",
    ),
    HOPPER: ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"),
    AMPERE: ("mma_v2",),
    f"{AMPERE}.async_copy": (
        "async_copy_global_to_shared", "mbarrier_arrive",
    ),
    f"{HOPPER}.tma": (
        "async_copy_global_to_shared", "async_copy_shared_to_global", "make_tensor_descriptor",
        "store_wait",
    ),
    f"{HOPPER}.mbarrier": ("arrive", "expect", "init", "wait", "MBarrierLayout"),
}  # fmt: skip

_SAME = frozenset({
    "abs", "associative_scan", "bfloat16", "cdiv", "convert_layout", "exp", "exp2", "float16",
    "float32", "floor", "fma", "full", "int32", "int64", "load", "log", "log2", "max", "maximum",
    "min", "minimum", "num_programs", "program_id", "rsqrt", "sqrt", "static_range", "store",
    "sum", "where",
})  # fmt: skip
_OTHERS = {
    "PropagateNan": "tl.PropagateNan",
    "range": "range",
    "sigmoid": "sigmoid",
    "tanh_series": "tanh_series",
}
_NAME = re.compile(r"\btl\.(\w+)")
_ARANGE = re.compile(r"\btl\.arange\((\d+), (\d+)\)")


def gluon_text(text: str, layout: str) -> str:
    """One printed line of a Triton kernel in Gluon.

    Args:
        text: the line.
        layout: text of the layout that vectors get which are made there.

    Raises:
        RefusedError: the line uses something that is not translated.
    """

    def name(found: re.Match[str]) -> str:
        word = found[1]
        if word in _SAME:
            return f"gl.{word}"
        if word not in _OTHERS:
            raise RefusedError(f"no Gluon text for tl.{word}")
        return _OTHERS[word]

    return _NAME.sub(name, _ARANGE.sub(rf"gl.arange(\1, \2, layout={layout})", text))


def gluon_lines(lines: Texts | list[str], layout: str) -> Texts:
    """Printed lines of a Triton kernel in Gluon; see :func:`gluon_text`."""
    return tuple(gluon_text(line, layout) for line in lines)


def helpers(printed: str) -> Texts:
    """The functions that printed lines need, as lines of a generated file."""
    needed = [text for name, text in _HELPERS.items() if f"tl.{name}(" in printed]
    between = ("", "")
    return tuple(line for i, text in enumerate(needed) for line in (*(between if i else ()), *text))


_HELPERS = {"sigmoid": SIGMOID, "tanh_series": TANH_SERIES}


@lru_cache(maxsize=1)
def missing_names() -> tuple[str, ...]:
    """Names of Gluon that generated files use and the installed Triton does not have."""
    missing = []
    for module, names in _USED.items():
        try:
            found: object = importlib.import_module(module)
        except ImportError:
            # ``tma`` and ``mbarrier`` are modules in 3.6; elsewhere they may be attributes.
            outer, _, inner = module.rpartition(".")
            try:
                found = getattr(importlib.import_module(outer), inner, None)
            except ImportError:
                found = None
        missing += [f"{module}.{n}" for n in names if not hasattr(found, n)]
    return tuple(missing)
