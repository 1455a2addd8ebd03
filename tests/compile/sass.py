"""What reaches the matrix descriptors of a kernel's wgmma instructions, from its machine code.

A wgmma takes its operands from shared memory through 64-bit descriptors in uniform registers. They
are made from the start of shared memory, constants, warp numbers and stage counters, never from a
kernel's parameters. An assembler once mixed the two up: it hoisted a descriptor's sum in front of a
loop and took the base from a register that still held a parameter. PTX is right there, so only the
machine code shows it.

The analysis is a forward one over the control-flow graph of each function. Every register holds the
set of suspect places its value may come from: a read of the constant bank, a load from global
memory, or nothing at all (no definition on some path). A join of paths unites the sets; a guarded
instruction may leave its register as it was.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from attncc.runtime.inspect import tool

UNDEFINED = 1
"""The bit of a register that no instruction has written."""

SHOWN = 3
"""Origins of a value that a message names."""

State = dict[str, int]
"""Registers and the bits of their suspect origins; one that is missing is undefined."""

Effect = tuple[tuple[str, ...], tuple[str, ...], int]
"""Registers that an instruction writes, those it reads, and the bit of a suspect place."""

_LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P[T\d]+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^(\S+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"(?<![\w.])(UR|R)(\d+)(?!\w)")
_PLAIN = re.compile(r"^[-~|]?(UR|R)(\d+|Z)\b[^\[]*$")
_PREDICATE = re.compile(r"^!?U?P([T\d]|R)\b")
_CONSTANT = re.compile(r"cx?\[[^\]]+\]\[[^\]]+\]")
_MEMORY = re.compile(r"\w*(?:\[[^\]]*\])+")
_SLOT = re.compile(r"^\[R1(?:\+(0x[0-9a-f]+))?\]$")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_SHAPE = re.compile(r"^[A-Z]GMMA\.(?:SP\.)?64x(\d+)x\d+\.(F16|F32|S32)?")

_NO_RESULT = frozenset(
    {"BAR", "BRA", "BSSY", "BSYNC", "BREAK", "CALL", "EXIT", "NANOSLEEP", "NOP", "RET", "R2P",
     "USETMAXREG", "WARPSYNC", "YIELD"}
)  # fmt: skip
_PREDICATE_FIRST = frozenset({"LOP3", "ULOP3", "ATOM", "ATOMG", "ATOMS", "ELECT", "MATCH", "SHFL"})
_BULK = frozenset({"UTMALDG", "UTMASTG", "UBLKCP"})
_GLOBAL = frozenset({"LD", "LDG", "ATOM", "ATOMG"})
_JUMPS = frozenset({"BRA", "CALL"})
_UNKNOWN_FLOW = frozenset({"BRX", "BRXU", "JMP", "JMX", "JMXU"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: its place in the function, in bytes.
        guarded: it runs under a predicate.
        name: the opcode without modifiers.
        opcode: name with its modifiers.
        operands: texts, destinations first.
        text: the whole of it.
    """

    address: int
    guarded: bool
    name: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def target(self) -> str | None:
        """The label it may jump to or call."""
        found = _TARGET.search(self.text)
        return found[1] if found else None


@dataclass(slots=True)
class Function:
    """Instructions of one function, with what it calls behind them, and where labels stand."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fault:
    """A descriptor that may hold something else.

    Attributes:
        function: the kernel.
        use: the instruction that takes the descriptor.
        register: the descriptor's register.
        origins: where its value may come from.
    """

    function: str
    use: Instruction
    register: str
    origins: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.function} at {self.use.address:#x}: {self.register} of `{self.use.text}` may "
            f"hold {'; '.join(self.origins)}"
        )


@lru_cache(maxsize=4)
def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text, by the disassembler that Triton carries."""
    with tempfile.TemporaryDirectory(prefix="attncc-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool("nvdisasm")), "-c", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@lru_cache(maxsize=4)
def functions(text: str) -> list[Function]:
    """The functions of a disassembly."""
    found: list[Function] = []
    for line in text.splitlines():
        label, code = _LABEL.match(line), _LINE.match(line)
        if label and label[1].startswith(".text."):
            found.append(Function(label[1].removeprefix(".text.")))
        elif label and found:
            found[-1].labels[label[1]] = len(found[-1].code)
        elif code and found:
            address, guard, opcode, rest = code.groups()
            operands = tuple(o.strip() for o in re.split(r",(?![^\[{]*[\]}])", rest) if o.strip())
            shown = f"{guard or ''}{opcode} {rest}".strip()
            always = guard is None or guard.strip() in ("@PT", "@UPT")
            name = opcode.partition(".")[0]
            found[-1].code.append(
                Instruction(int(address, 16), not always, name, opcode, operands, shown)
            )
    return found


# --- what one instruction reads and writes ---------------------------------------------------


def results(one: Instruction) -> tuple[str, ...]:
    """Registers, and spilled ones' places on the stack, that an instruction writes."""
    if one.name in _NO_RESULT or not one.operands:
        return ()
    if one.name == "STL":
        return _slots(one)
    operands = list(one.operands)
    if _PREDICATE.match(operands[0]):
        if one.name not in _PREDICATE_FIRST:
            return ()  # a comparison
        while operands and _PREDICATE.match(operands[0]):
            operands.pop(0)
    match = _PLAIN.match(operands[0]) if operands else None
    if match is None or match[2] == "Z":
        return ()
    return _run(match[1], int(match[2]), width(one))


def width(one: Instruction) -> int:
    """How many registers a result takes."""
    shape = _SHAPE.match(one.opcode)
    if shape:
        return int(shape[1]) // (4 if shape[2] == "F16" else 2)
    parts = one.opcode.split(".")
    if one.name in ("HMMA", "IMMA", "DMMA", "QMMA"):
        return 4
    if "128" in parts or ("M88" in parts and parts[-1] == "4"):
        return 4
    doubled = one.name in ("CS2R", "DADD", "DMUL", "DFMA") and "32" not in parts
    wide = {"64", "WIDE", "F64"} & set(parts) or (one.name == "F2I" and {"U64", "S64"} & set(parts))
    return 2 if doubled or wide or ("M88" in parts and parts[-1] == "2") else 1


def _slots(one: Instruction) -> tuple[str, ...]:
    """The places of a spilled register on the stack."""
    for operand in one.operands:
        match = _SLOT.match(operand)
        if match:
            first = int(match[1] or "0", 16)
            return tuple(f"[R1+{first + 4 * i:#x}]" for i in range(width(one)))
    return ()


def _run(kind: str, first: int, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}{first + i}" for i in range(count))


def reads(one: Instruction, written: tuple[str, ...]) -> Iterator[str]:
    """What an instruction's result is made from; not the registers of an address."""
    operands = list(one.operands)
    if one.name == "LDL":
        yield from _slots(one)
        return
    if written and one.name != "STL":
        operands.remove(next(o for o in operands if _PLAIN.match(o)))
    count = width(one) if one.name == "STL" else 2 if "64" in one.opcode.split(".") else 1
    for operand in operands:
        if _PREDICATE.match(operand):
            continue
        for kind, number in _REGISTER.findall(_MEMORY.sub("", operand)):
            yield from _run(kind, int(number), count)


def descriptors(one: Instruction) -> tuple[str, ...]:
    """Registers that hold the matrix descriptors of a wgmma.

    ``gdesc[URn]`` names two descriptors of two registers each: A, then B. With A in registers the
    first is not used.
    """
    if one.name[1:] != "GMMA":
        return ()
    match = _DESCRIPTOR.search(one.text)
    if match is None:
        return ()
    first = int(match[1])
    from_registers = len([o for o in one.operands[:2] if _PLAIN.match(o)]) == 2
    return _run("UR", first + 2, 2) if from_registers else _run("UR", first, 4)


# --- the analysis ----------------------------------------------------------------------------


class Analysis:
    """Suspect origins of the registers of one function."""

    def __init__(self, function: Function) -> None:
        """Cut a function into blocks.

        Raises:
            ValueError: it jumps to a computed or unknown place.
        """
        self.function = function
        self.origins: list[str] = ["nothing: no definition on some path"]
        self._effects: dict[int, Effect] = {}  # by address
        code = function.code
        odd = [i.text for i in code if i.name in _UNKNOWN_FLOW]
        odd += [i.text for i in code if i.name in _JUMPS and i.target not in function.labels]
        if odd:
            raise ValueError(f"{function.name}: a jump to an unknown place: {odd[0]}")
        starts = {0, *function.labels.values()}
        ends = ("BRA", "EXIT", "RET", "CALL", "WARPSYNC")
        starts |= {i + 1 for i, one in enumerate(code) if one.name in ends}
        self.starts = sorted(s for s in starts if s < len(code))
        self.ends = dict(zip(self.starts, [*self.starts[1:], len(code)], strict=True))

    def faults(self) -> list[Fault]:
        """Every descriptor that may hold a suspect value."""
        code, found = self.function.code, []
        for start, entry in self._entries().items():
            state = dict(entry)
            for one in code[start : self.ends[start]]:
                for register in descriptors(one):
                    bits = state.get(register, UNDEFINED)
                    if bits:
                        found.append(Fault(self.function.name, one, register, self._named(bits)))
                self._apply(one, state)
        return found

    def _named(self, bits: int) -> tuple[str, ...]:
        found = [t for i, t in enumerate(self.origins) if bits >> i & 1]
        more = (f"{len(found) - SHOWN} more",) if len(found) > SHOWN else ()
        return (*found[:SHOWN], *more)

    def _entries(self) -> dict[int, State]:
        """The state at the start of each block that can be reached."""
        entries: dict[int, State] = {0: {}}
        work = [0]
        while work:
            start = work.pop()
            state = dict(entries[start])
            end = self.ends[start]
            for one in self.function.code[start:end]:
                self._apply(one, state)
            for after in self._next(end):
                if after not in entries:
                    entries[after] = dict(state)
                elif not _join(entries[after], state):
                    continue
                if after not in work:
                    work.append(after)
        return entries

    def _next(self, end: int) -> list[int]:
        """Blocks that may follow the one that ends there."""
        last = self.function.code[end - 1]
        found = []
        if last.name in ("BRA", "WARPSYNC") and last.target is not None:
            found.append(self.function.labels[last.target])
        leaves = last.name in ("EXIT", "RET") or (last.name == "BRA" and not _conditional(last))
        if (last.guarded or not leaves) and end < len(self.function.code):
            found.append(end)
        return found

    def _apply(self, one: Instruction, state: State) -> None:
        if one.name == "CALL":
            self._call(one, state)
            return
        effect = self._effects.get(one.address)
        if effect is None:  # its text is read once, however often its block is gone through
            written = results(one)
            read = tuple(reads(one, written)) if written else ()
            effect = written, read, self._source(one) if written else 0
            self._effects[one.address] = effect
        written, read, bits = effect
        for register in read:
            bits |= state.get(register, UNDEFINED)
        for register in written:
            kept = state.get(register, UNDEFINED) if one.guarded else 0
            state[register] = bits | kept

    def _source(self, one: Instruction) -> int:
        """The bit of a value that comes from a suspect place."""
        constant = _CONSTANT.search(", ".join(one.operands[1:]))
        if constant is None and one.name not in _GLOBAL:
            return 0
        what = f"the constant {constant[0]}" if constant else "a value of global memory"
        self.origins.append(f"{what}, read at {one.address:#x}")
        return 1 << len(self.origins) - 1

    def _call(self, one: Instruction, state: State) -> None:
        """A subroutine: whatever it writes may come from whatever it reads."""
        code = self.function.code
        start = self.function.labels[one.target or ""]
        end = next(i for i in range(start, len(code)) if code[i].name == "RET")
        body = [(i, results(i)) for i in code[start:end]]
        inner = {r for _, written in body for r in written}
        read = {r for i, written in body for r in reads(i, written)}
        bits = 0
        for register in read:
            bits |= state.get(register, 0)
        for register in inner:
            state[register] = state.get(register, 0) | bits


def _conditional(jump: Instruction) -> bool:
    """Whether a jump also has a predicate among its operands (``BRA.U !UP0, ...``)."""
    return any(_PREDICATE.match(o) for o in jump.operands)


def _join(into: State, other: State) -> bool:
    """Unite what two paths leave; says whether anything is new."""
    changed = False
    for register in into.keys() | other.keys():
        old = into.get(register, UNDEFINED)
        new = old | other.get(register, UNDEFINED)
        if new != old or register not in into:
            into[register] = new
            changed |= new != old
    return changed


def faults(text: str) -> list[Fault]:
    """Every matrix descriptor of a disassembly that may hold something else."""
    return [f for one in functions(text) for f in Analysis(one).faults()]


def sent_twice(text: str) -> list[str]:
    """Bulk copies that an assembler lets two parts of a warp send, where one lane was to.

    Such an instruction acts once for the lanes that are together. Where a copy is guarded by a vote
    of the warp, lanes must not have parted since: ``ptxas`` 13.4 kept a vote across a jump of all
    lanes but the first, and both parts sent the copy behind it. Its bytes counted twice, and who
    waited for them waited forever.
    """
    found = []
    for function in functions(text):
        behind: dict[int, list[str]] = {}
        for label, place in function.labels.items():
            behind.setdefault(place, []).append(label)
        votes: dict[str, int] = {}
        parted: dict[str, int] = {}  # labels that some lanes jump to, by the jump's place
        since = -1  # the last such jump whose lanes have come, and not met the others again
        for i, one in enumerate(function.code):
            since = max([since, *(parted.get(label, -1) for label in behind.get(i, ()))])
            guard = re.match(r"@!?(U?P\d+) ", one.text)
            if one.name in ("BSYNC", "WARPSYNC"):
                since = -1
            elif one.name == "BRA" and guard and guard[1].startswith("P"):
                parted[one.target or ""] = i
            elif one.name == "VOTEU":
                votes[one.operands[0]] = i
            elif one.name in _BULK and guard and votes.get(guard[1], i) < since:
                found.append(f"{function.name} at {one.address:#x}: `{one.text}`")
    return found


def wgmmas(text: str) -> int:
    """How many instructions take matrix descriptors: that an analysis had something to do."""
    return sum(bool(descriptors(i)) for f in functions(text) for i in f.code)


def report(found: Sequence[Fault]) -> str:
    """Faults, one a line."""
    return "\n".join(map(str, found))
