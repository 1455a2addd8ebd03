"""What in ``docs/`` is derived: tables of ``ledger.md``, pictures, what ``declare.md`` prints.

``--write`` writes them; without it, whether they are current is checked.

The tables of the source document, "Attention Cache and Sequence Parallelism", stand here as data,
with its own axis names; beside them comes what the declarations give.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attncc.dsl.ledger import Ledger, Phase, ledger
from attncc.dsl.ledger.compare import QUESTIONS, compare
from attncc.dsl.ledger.show import byte_rows, grid, object_rows, peak_rows
from attncc.dsl.library.attention import attention
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.dsl.library.layers import LAYERS
from attncc.dsl.library.sparse_mla import sparse_mla
from attncc.dsl.picture import svg

DOCS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the document's object tables.

    Attributes:
        title: the row's, as the layers have it.
        symbols: of the objects.
        shapes: axes of each, in the document's names.
        way: producers and consumers.
        lifetime: in its words.
    """

    title: str
    symbols: str
    shapes: tuple[str, ...]
    way: str
    lifetime: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the document.

    Attributes:
        layer: name of the layer that it is about.
        axes: the document's axes in the layer's.
        sizes: a model's, for the bytes.
        layers: how many it has.
        model: which.
        rows: the table.
    """

    layer: str
    axes: Mapping[str, str]
    sizes: Mapping[str, int]
    layers: int
    model: str
    rows: tuple[Row, ...]


TEMPORARY = "temporary activation"
MHA = Table(
    "mha_decode",
    {"T": "S", "Hq": "Hkv*G", "d": "D", "D": "M"},
    {"B": 1, "M": 4096, "Hkv": 32, "G": 1, "D": 128, "S": 8192},
    32,
    "the document's example: 32 layers, BF16, 8192 tokens",
    (
        Row(
            "Current layer input", "h_t", ("B 1 D",), "sublayer below → Q/K/V projections",
            TEMPORARY,
        ),
        Row("Current Query", "q_t", ("B Hq 1 d",), "W_Q, reshape, RoPE → QK product", TEMPORARY),
        Row(
            "Current Key/Value", "k_t, v_t", ("B Hkv 1 d",),
            "W_K / W_V, reshape, RoPE of K → cache update", TEMPORARY,
        ),
        Row(
            "Historical Key/Value", "K_cache, V_cache", ("B Hkv T d",),
            "old cache and current K/V → products with scores and values", "cache across steps",
        ),
        Row(
            "Scores and probabilities", "a_t, p_t", ("B Hq 1 T",),
            "QK product, scale, mask, softmax → PV product", TEMPORARY,
        ),
        Row(
            "Output", "o_t, y_t", ("B Hq 1 d", "B 1 D"),
            "PV product, concatenation, W_O → sublayer above", TEMPORARY,
        ),
    ),
)  # fmt: skip

DSA = Table(
    "dsa_layer",
    {"T": "S", "Hidx": "Hi", "Didx": "Di", "Rkv": "R", "DR": "P", "k": "J", "D": "M"},
    {
        "B": 1, "M": 7168, "H": 128, "D": 128, "V": 128, "R": 512, "P": 64, "Hi": 64, "Di": 128,
        "Rq": 1536, "S": 65536,
    },
    61,
    "DeepSeek-V3.2-Exp: 61 layers, 65536 tokens",
    (
        Row(
            "Indexer Query", "q_i", ("B Hidx Didx",),
            "current hidden → index Q projection, RoPE, quantisation", TEMPORARY,
        ),
        Row(
            "Indexer Key", "k_j, FP8 and scale", ("B T Didx",),
            "each past hidden → k_cache, k_scale_cache", "cache that grows with T",
        ),
        Row(
            "Indexer head weights", "w_i", ("B Hidx",),
            "current hidden → weighted sum of scores over heads", TEMPORARY,
        ),
        Row("Index score", "I_j", ("B T",), "FP8 dot, ReLU, sum over heads → top-k", TEMPORARY),
        Row(
            "Selected positions", "J = TopK(I, k)", ("B k",),
            "indexer → gather or mask of the main MLA", "temporary control object",
        ),
        Row(
            "MLA latent cache", "cKV_j, kR_j", ("B T Rkv", "B T DR"),
            "KV down-projection, RMSNorm, RoPE → main MLA", "cache that grows with T",
        ),
        Row(
            "Main MLA output", "y_t", ("B D",),
            "only the latents of J → W_UV, W_O", TEMPORARY,
        ),
    ),
)  # fmt: skip

GDN = Table(
    "gdn_layer",
    {"H": "Hk*G", "D": "M"},
    {
        "B": 1, "M": 2048, "Hk": 16, "G": 2, "K": 128, "V": 128, "W": 4,
    },
    36,
    "Qwen3-Next: 36 such layers, any number of tokens",
    (
        Row(
            "Q/K/V", "q_t, k_t, v_t", ("B H K", "B H V"),
            "projection, ShortConv, SiLU, L2Norm of Q and K → recurrence", TEMPORARY,
        ),
        Row(
            "Decay and write rate", "lambda_t, beta_t", ("B H",),
            "a_proj / b_proj and their parametrisation → state update", TEMPORARY,
        ),
        Row(
            "Decayed state", "Sbar_t", ("B H K V",), "lambda_t S_(t-1) → prediction, write",
            "intermediate in the formulas; a kernel may fuse it",
        ),
        Row(
            "Prediction and error", "vhat_t, e_t", ("B H V",),
            "Sbar_t^T k_t, beta (v - vhat) → delta write", TEMPORARY,
        ),
        Row(
            "Recurrent state", "S_t", ("B H K V",),
            "previous step → read and written now → next step", "state of fixed size across tokens",
        ),
        Row(
            "Short-convolution state", "conv_state_q/k/v", (),
            "previous step of ShortConv → next step", "cache of fixed size",
        ),
        Row(
            "Read-out", "r_t, y_t", ("B H V", "B D"), "q_t^T S_t, gated RMSNorm, W_O", TEMPORARY,
        ),
    ),
)  # fmt: skip

TABLES = (MHA, DSA, GDN)

JOINT = (
    (
        "Q/K/V of the whole sequence: activations", "index K and MLA latent: activations",
        "chunk activations and boundary states",
    ),
    ("K_cache, V_cache", "index K and scale, cKV and kR", "S_t and the short-convolution state"),
    ("yes, O(T Hkv d)", "yes, two compressed histories", "no, fixed in T"),
    ("all of K/V", "index: all of it; main MLA: top-k", "the current state"),
    (
        "KV blocks meet globally", "global top-k and the selected latents",
        "boundary state or prefix scan",
    ),
    (
        "heads are cut, then attention is local", "the index's sum over heads may need a reduction",
        "a state per head comes naturally",
    ),
    (
        "KV blocks go round", "shards of index and latent, and a global top-k",
        "states go on, not KV",
    ),
)  # fmt: skip
"""The document's joint comparison, by question: MHA, DSA, GDN."""


def numbers(table: Table, phase: Phase) -> Ledger:
    """The ledger of a table's layer with its model's sizes."""
    sizes = dict(table.sizes)
    if phase is Phase.TRAIN:
        sizes["T"] = sizes.pop("S", 8192)
    return ledger(LAYERS[table.layer], sizes, phase, table.layers)


def _section(table: Table) -> list[str]:
    layer = LAYERS[table.layer]
    found = {row[0]: row for row in object_rows(ledger(layer, None, Phase.DECODE))}
    rows = []
    for row in table.rows:
        _, names, shapes, dtype, way, lifetime = found[row.title]
        theirs = ", ".join(f"[{', '.join(s.split())}]" for s in row.shapes) or "bounded windows"
        rows.append(
            (
                row.title,
                row.symbols,
                theirs,
                row.way,
                row.lifetime,
                names,
                shapes,
                dtype,
                way,
                lifetime,
            )
        )
    head = (
        "object", "document: symbol", "shape", "producer → consumer", "lifetime",
        "attncc: symbol / name", "shape", "dtype", "producer → consumers", "lifetime",
    )  # fmt: skip
    axes = ", ".join(f"{theirs} is {ours}" for theirs, ours in table.axes.items())
    decode = numbers(table, Phase.DECODE)
    return [
        f"`attncc ledger {table.layer}`; {axes}.", "",
        *grid(head, rows), "", f"Bytes in decode, {table.model}:", "",
        *grid(("object", "memory", "growth", "bytes", "=", "read a step", "="), byte_rows(decode)),
        "", *_peaks(table), "", f"![dataflow of {table.layer}]({table.layer}.svg)",
    ]  # fmt: skip


def _peaks(table: Table) -> list[str]:
    """``M_peak`` of a decode step and of a training step side by side."""
    decode, train = (peak_rows(numbers(table, p)) for p in (Phase.DECODE, Phase.TRAIN))
    tokens = table.sizes.get("S", 8192)
    rows = [(a[0], a[1], b[1]) for a, b in zip(decode, train, strict=True)]
    return grid(("M_peak, bytes", "decode", f"training, {tokens} tokens"), rows)


def _joint() -> list[str]:
    derived = compare([attention, sparse_mla, gated_delta_rule])
    rows = []
    for question, theirs, ours in zip(QUESTIONS, JOINT, derived, strict=True):
        rows.append((question, *(x for pair in zip(theirs, ours[1:], strict=True) for x in pair)))
    head = (
        "", "MHA (document)", "attention", "DSA (document)", "sparse_mla", "GDN (document)",
        "gated_delta_rule",
    )  # fmt: skip
    return grid(head, rows)


def filled(text: str) -> str:
    """``ledger.md`` with what stands between its markers derived anew.

    Raises:
        ValueError: a marker is missing.
    """
    sections = {t.layer: _section(t) for t in TABLES} | {"joint": _joint()}
    for name, lines in sections.items():
        head, begin, rest = text.partition(f"<!-- {name}:begin -->\n")
        _, end, tail = rest.partition(f"<!-- {name}:end -->")
        if not begin or not end:
            raise ValueError(f"docs/ledger.md has no markers {name}")
        text = head + begin + "\n".join(lines) + "\n" + end + tail
    return text


_BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def ran(text: str) -> str:
    """A page whose ``python`` blocks were run in order, with what they print in ``text`` blocks.

    The blocks are one file, ``my_ops.py``, so that errors can show its lines.
    """
    code = "".join(m[2] + "\n" for m in _BLOCK.finditer(text) if m[1] == "python")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "my_ops.py"
        path.write_text(code, encoding="utf-8")
        scope: dict[str, object] = {"__name__": "my_ops", "__file__": str(path)}
        state = {"line": 0, "printed": ""}

        def block(match: re.Match[str]) -> str:
            if match[1] == "text":
                return f"```text\n{state['printed'].rstrip()}\n```"
            tree = ast.increment_lineno(ast.parse(match[2]), state["line"])
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(tree, str(path), "exec"), scope)
            state["line"] += match[2].count("\n") + 1
            state["printed"] = out.getvalue().replace(f"{path.parent}/", "")
            return match[0]

        return _BLOCK.sub(block, text)


def files() -> dict[str, str]:
    """Every derived file by name."""
    found = {f"{t.layer}.svg": svg(LAYERS[t.layer]) for t in TABLES}
    for name, derive in (("ledger.md", filled), ("declare.md", ran)):
        found[name] = derive((DOCS / name).read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> int:
    """Write or check; 1 where a file is not current."""
    stale = []
    for name, content in files().items():
        path = DOCS / name
        if "--write" in arguments:
            path.write_text(content, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
    for name in stale:
        print(f"docs/{name} is not current: python docs/generate.py --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
