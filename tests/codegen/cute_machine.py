"""Runs generated CuTe-DSL files on the CPU: what they compute, and whether warps keep in step.

The file runs as the Python it is. Every thread of a warpgroup, or of the loading warp, runs at
once: what differs between them is a tensor with one element a thread. Partitions take turns as in
:mod:`tests.codegen.gluon_machine`, copies arrive at any later time, and a product reads its
operands when it is waited for. PTX and the layouts that CuTe derives are replaced: registers are
taken as the PTX ISA lays them out for ``wgmma``, and shared memory as the boxes that copies bring.
What lies in shared memory must fit there without meeting anything else, and a program's tensor maps
must fit in its part of the global scratch: on a GPU either would be another program's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from tests.codegen.gluon_machine import Barrier, Machine, ProtocolError

SPAN = 40  # bits of an address inside a tensor; what is above numbers the tensors
MAP_BYTES = 128
DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32,
          "Int32": torch.int32, "Int64": torch.int64, "Uint8": torch.uint8}  # fmt: skip
LANES = torch.arange(128)


def turned():
    """Rows and columns of the two elements that a lane has of a matrix, by ``.trans``."""
    lanes = torch.arange(32)
    return torch.stack([lanes % 4 * 2, lanes % 4 * 2 + 1]), (lanes // 4).expand(2, -1)


class Kind:
    """A number's type: converts."""

    def __init__(self, name):
        self.name, self.dtype = name, DTYPES[name]

    def __call__(self, x):
        if self.dtype.is_floating_point:
            return torch.as_tensor(x).to(self.dtype)
        if isinstance(x, torch.Tensor):
            return (x.trunc() if x.is_floating_point() else x).to(self.dtype).long()
        return int(x)


def integer(x):
    return x if isinstance(x, torch.Tensor) else int(x)


@dataclass
class Pending:
    """A product on its way."""

    sums: Registers
    left: Any
    right: Any
    accumulate: bool


class Registers:
    """What each of 128 threads holds of a tile, in ``wgmma``'s order."""

    def __init__(self, machine, count):
        self.machine, self.data = machine, torch.full((count, 128), torch.nan)

    def _free(self):
        if any(self is p.sums for p in self.machine.local.thread.issued):
            raise ProtocolError("registers of a product that is under way")

    def __getitem__(self, i):
        self._free()
        return self.data[i].clone()

    def __setitem__(self, i, value):
        self._free()
        self.data[i] = value

    def fill(self, value):
        self._free()
        self.data.fill_(value)

    def places(self):
        i = torch.arange(len(self.data))[:, None]
        row = LANES // 32 * 16 + LANES % 32 // 4 + 8 * (i // 2 % 2)
        return row, 8 * (i // 4) + 2 * (LANES % 4) + i % 2

    def matrix(self):
        found = torch.empty(64, len(self.data) * 2, dtype=self.data.dtype)
        found[self.places()] = self.data
        return found

    def put(self, matrix):
        self.data = matrix[self.places()]


@dataclass
class Ring:
    """Places in shared memory, each the boxes of ``rows`` x 64 that copies bring."""

    machine: Machine
    at: int
    rows: int
    width: int
    place: int = 0
    turned: bool = False

    def __getitem__(self, index):
        return Ring(self.machine, self.at, self.rows, self.width, int(index[-1]), self.turned)

    def matrix(self):
        start = self.at + self.place * self.rows * self.width * 2
        boxes = [start + c * self.rows * 128 for c in range(self.width // 64)]
        found = torch.cat([self.machine.box(b, self.rows) for b in boxes], 1)
        return found if self.turned else found.T


@dataclass
class Map:
    """A tensor map; axes from the innermost."""

    machine: CuteMachine
    pointer: int
    sizes: list[int]
    strides: list[int]
    box: list[int]
    under_way: int = 0

    def read(self, at):
        offset = torch.zeros((), dtype=torch.long)
        inside = torch.ones((), dtype=torch.bool)
        axes = zip(at, self.sizes, [2, *self.strides], self.box, strict=True)
        for first, size, stride, count in axes:
            line = first + torch.arange(count)
            offset = line * stride + offset[..., None]
            inside = (line < size) & (line >= 0) & inside[..., None]
        found = self.machine.load(None, self.pointer + offset, inside)
        return found.permute(*reversed(range(found.dim()))).reshape(-1, self.box[0])

    def write(self, at, data):
        """Rows of two axes; what lies outside is stored nowhere."""
        (column, row), (width, height) = at, self.sizes
        lines, columns = torch.arange(len(data)) + row, torch.arange(data.shape[1]) + column
        inside = (lines < height)[:, None] & (columns < width)
        offset = lines[:, None] * self.strides[0] + columns * 2
        kind = next(k for k in DTYPES if DTYPES[k] == data.dtype)
        self.machine.store(Kind(kind), self.pointer + offset, data, inside)


class CuteMachine(Machine):
    """One program after another."""

    def __init__(self, seed, tensors):
        super().__init__(seed)
        self.tensors = tensors
        self.shared: dict[int, Any] = {}
        self.maps: dict[int, Map] = {}
        self.claims: dict[int, int] = {}  # bytes of what lies in shared memory, by where it starts
        self.arrived_all = self.partitions = self.shared_bytes = 0
        self.scratch = range(0)

    def claim(self, at, size):
        """Shared memory for one thing; a place may be used again for as much."""
        at = int(at)
        if not 0 <= at <= self.shared_bytes - size:
            raise ProtocolError("outside of shared memory")
        for start, other in self.claims.items():
            if start < at + size and at < start + other and (at, size) != (start, other):
                raise ProtocolError("shared memory that something else has")
        self.claims[at] = size

    # -- global memory

    def elements(self, address):
        flat = torch.as_tensor(address).long()
        numbers = (flat >> SPAN).unique()
        assert len(numbers) <= 1, "an address outside of its tensor"
        tensor = self.tensors[int(numbers[0]) - 1] if len(numbers) else self.tensors[0]
        size = tensor.element_size()
        room = tensor.untyped_storage().nbytes() // size - tensor.storage_offset()
        at = flat & ((1 << SPAN) - 1)
        assert not (at % size).any()
        return tensor.as_strided((room,), (1,), tensor.storage_offset()), at // size

    def load(self, kind, address, mask=True, other=0):
        memory, at = self.elements(address)
        assert kind is None or memory.dtype == kind.dtype
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
        assert (~mask | ((at >= 0) & (at < len(memory)))).all(), "outside of the tensor"
        if not len(memory):
            return torch.zeros(at.shape, dtype=memory.dtype)
        found = torch.where(mask, memory[torch.where(mask, at, 0)], 0).to(memory.dtype)
        if found.is_floating_point():
            return found
        return int(found) if not found.dim() else found.long()

    def store(self, kind, address, value, mask):
        memory, at = self.elements(address)
        assert memory.dtype == kind.dtype
        at, mask, value = torch.broadcast_tensors(at, torch.as_tensor(mask), kind(value))
        assert (~mask | ((at >= 0) & (at < len(memory)))).all(), "outside of the tensor"
        assert len(at[mask].unique()) == int(mask.sum()), "one element is stored twice"
        memory[at[mask]] = value[mask]

    def store_pair(self, kind, address, values, mask):
        assert not (torch.as_tensor(address) % 4).any(), "a pair across words"
        for i, value in enumerate(values):
            self.store(kind, address + i * kind.dtype.itemsize, value, mask)

    # -- barriers and shared memory

    def barrier(self, place):
        return self.barriers[int(place)]

    def start(self, place, count):
        assert int(place) not in self.barriers and int(place) % 8 == 0
        self.claim(place, 8)
        self.barriers[int(place)] = Barrier(count)

    def arrive_by(self, place, lane):
        self.pause()
        for _ in range(int((lane == 0).sum())):
            self.barrier(place).arrive(1)

    def expect_by(self, place, number, lane):
        assert int((lane == 0).sum()) == 1
        self.expect(place, number)

    def meet(self):
        self.arrived_all += 1
        self.pause(lambda: self.arrived_all == self.partitions)

    def make_map(self, at, room, lane, pointer, element_type, sizes, strides, box, swizzle=3):
        old = self.maps.get(int(at))
        if old is not None and old.under_way:
            raise ProtocolError("a tensor map is written while a copy uses it")
        assert min(map(int, sizes)) > 0 and all(s % 16 == 0 for s in strides)
        assert max(box) <= 256 and len(sizes) == len(box) == len(strides) + 1 and at % 128 == 0
        assert swizzle == (3 if box[0] * 2 == 128 else 0)
        for warp in range(len(self.local.lanes) // 32):  # each warp that is here has its own
            if int(at) + MAP_BYTES * warp not in self.scratch:
                raise ProtocolError("a tensor map outside of the program's scratch")
            self.claim(int(room) + MAP_BYTES * warp, MAP_BYTES)
        whole = [*map(int, sizes)], [*map(int, strides)], list(box)
        self.maps[int(at)] = Map(self, int(pointer), *whole)

    def bring(self, at, barrier, lane, tensor_map, where_from):
        found, target = self.maps[int(tensor_map)], self.barrier(barrier)
        where_from = [int(x) for x in where_from]
        assert int(at) % 1024 == 0
        self.claim(at, 2 * prod(found.box))
        found.under_way += 1

        def arrive():
            box = found.read(where_from)
            self.shared[int(at)] = box
            found.under_way -= 1
            target.arrived(box.numel() * 2)

        self.copies.append(arrive)
        self.pause()

    def bring_flat(self, at, barrier, lane, start, size):
        target = self.barrier(barrier)
        assert int(at) % 16 == int(start) % 16 == size % 16 == 0
        self.claim(at, size)

        def arrive():
            self.shared[int(at)] = self.load(None, start + 4 * torch.arange(size // 4))
            target.arrived(size)

        self.copies.append(arrive)
        self.pause()

    def box(self, at, rows):
        """Rows of 128 bytes from an address on; zeros where nothing was copied to."""
        held = {a: x for a, x in self.shared.items() if at <= a < at + 128 * rows}
        if not held:
            raise KeyError(at)
        found = torch.zeros(rows, 64, dtype=next(iter(held.values())).dtype)
        for place, data in held.items():
            first = (place - at) // 128
            found[first : first + len(data)] = data
        return found

    def number(self, at):
        at = torch.as_tensor(at)
        lowest = int(at.min())
        for start, data in self.shared.items():
            vector = isinstance(data, torch.Tensor) and data.dim() == 1
            if vector and start <= lowest < start + 4 * len(data):
                return data[(at - start) // 4]
        raise KeyError(lowest)

    def load_matrices(self, text, at):
        """``ldmatrix``: four matrices of 8 x 8 a warp, from the rows that its lanes point at."""
        assert ".x4.trans" in text
        start = self.local.place
        data = self.box(start, 64)
        row, place = (at - start) // 128, (at - start) % 128
        assert not (place % 16).any() and int(row.max()) < 64
        column = (place // 16 ^ row % 8) * 8
        chunks = data[row[:, None], column[:, None] + torch.arange(8)]  # of each lane
        matrices = chunks.unflatten(0, (4, 4, 8))  # warps, matrices of each, rows
        return list(matrices[(slice(None), slice(None), *turned())].permute(1, 2, 0, 3).flatten(2))

    def tell(self, at, value, lane):
        self.claim(at, 4)
        self.shared[at] = int(value)

    # -- what leaves: four warps with a part of the columns each, as one

    def assembly(self, text, constraints, at, *values):
        """``stmatrix``: matrices of 8 x 8, to the rows that the lanes of a warp point at."""
        assert text.startswith("stmatrix") and f".x{len(values)}.trans" in text
        if self.local.thread.stores:
            raise ProtocolError("memory that is still being sent")
        first, (rows, columns) = self.local.place, turned()
        tile = self.shared.setdefault(first, torch.zeros(64, 64, dtype=values[0].dtype))
        for start in range(0, 128, 32):
            for n, pair in enumerate(values):
                places = (at[start + 8 * n :][:8] - first)[rows]
                column = start // 2 + places % 32 // 2 + columns
                tile[places // 32, column] = pair[:, start : start + 32]

    def noting(self, function):
        """A generated function whose second argument is where a tile starts."""

        def own(first, place, *others):
            self.local.place = int(place)
            return function(first, place, *others)

        return own

    def wait_sent(self, lane):
        thread = self.local.thread
        self.pause(lambda: not thread.stores)

    def send(self, at, tensor_map, where_to, lane):
        found, thread = self.maps[int(tensor_map)], self.local.thread
        column, row = map(int, where_to)
        width, height = found.box
        tile = self.shared[int(at)]
        self.claim(at, 2 * width * height)

        def leave():
            for warp in range(4):
                own = tile[:height, warp * width : (warp + 1) * width]
                found.write((column + warp * width, row), own)
            thread.stores -= 1

        thread.stores += 1
        self.copies.append(leave)
        self.pause()

    # -- products

    def multiply(self, op, sums, left, right, accumulate):
        issued = self.local.thread.issued
        assert not any(p.sums is sums for p in issued)
        issued.append(Pending(sums, left, right, accumulate))
        self.pause()

    def wait_group(self, outstanding):
        self.pause()
        issued = self.local.thread.issued
        while len(issued) > outstanding:
            own = issued.pop(0)
            left = own.left.matrix() if isinstance(own.left, Registers) else own.left.matrix().T
            found = left.float() @ own.right.matrix().float()
            own.sums.put(own.sums.matrix() + found if own.accumulate else found)

    def narrow(self, kind, wide, operand):
        if any(operand is p.left for p in self.local.thread.issued):
            raise ProtocolError("an operand of a product that is under way")
        if isinstance(wide, Registers):
            wide._free()
            wide = wide.data
        self.pack(kind, list(wide), operand)

    def pack(self, kind, values, packed):
        found = torch.stack([torch.as_tensor(v).broadcast_to(128) for v in values]).to(kind.dtype)
        if isinstance(packed, Registers):
            packed.data = found
        else:
            packed[:] = found.unflatten(0, (-1, 2))


# --- the language ----------------------------------------------------------------------------


def _where(condition, yes, no, kind):
    if not isinstance(condition, torch.Tensor) and not isinstance(yes, torch.Tensor):
        return kind(yes if condition else no)
    yes, no = (torch.as_tensor(kind(x)) for x in (yes, no))
    found = torch.where(torch.as_tensor(condition), yes, no)
    return found if found.dim() or found.is_floating_point() else int(found)


def _within(real, quiet, whole):
    def of(a, b, nan=False):
        if not any(isinstance(x, torch.Tensor) for x in (a, b)):
            return whole(a, b)
        a, b = torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))
        return (quiet if a.is_floating_point() and not nan else real)(a, b)

    return of


def _of_warp(join):
    def of(values):
        found = torch.stack([torch.as_tensor(v).broadcast_to(32) for v in values])
        best = join(found)
        return best if best.is_floating_point() else int(best)

    return of


def _real(function):
    return lambda x: function(torch.as_tensor(x, dtype=torch.float32))


def replaced(machine: CuteMachine) -> dict[str, Any]:
    """What stands for the file's own helpers."""
    larger = _within(torch.maximum, torch.fmax, max)
    smaller = _within(torch.minimum, torch.fmin, min)
    return {
        "where": _where, "larger": larger, "smaller": smaller,
        "magnitude": lambda x: abs(x), "divided": lambda a, b: torch.as_tensor(a) / b,
        "fused": lambda a, b, c: torch.as_tensor(a) * b + c,
        **{n: _real(getattr(torch, n)) for n in
           ("exp2", "exp", "log", "log2", "sqrt", "rsqrt", "floor", "sigmoid")},
        "load": machine.load, "store": machine.store, "store_pair": machine.store_pair,
        "largest": _of_warp(torch.amax), "smallest": _of_warp(torch.amin),
        "start_barrier": machine.start, "wait": machine.wait, "arrive": machine.arrive_by,
        "release": machine.arrive_by, "expect": machine.expect_by,
        "tell": machine.tell,
        "told": lambda at: machine.shared[at], "make_map": machine.make_map,
        "copy": machine.bring, "multiply": machine.multiply, "narrow": machine.narrow,
        "ring": lambda base, at, atom, shape, order: (
            Ring(machine, at, shape[1], shape[0], turned=True) if order[0]
            else Ring(machine, at, shape[0], shape[1])
        ),
        "compute_first": lambda total: None, "copy_flat": machine.bring_flat,
        "number": machine.number, "four": machine.load_matrices,
        "halves": lambda kind, bits: list(bits.to(kind.dtype).float()), "pack": machine.pack,
        "ptx": machine.assembly, "wait_sent": machine.wait_sent, "send": machine.send,
        "clear": lambda at, size, thread: None,
        **dict.fromkeys(("scores_op", "sums_op", "state_op", "rows_op", "tokens_op"), lambda: None),
    }  # fmt: skip


def language(machine: CuteMachine) -> dict[str, Any]:
    """The names that a generated file imports."""
    kinds = {name: Kind(name) for name in DTYPES}
    nothing = lambda *args, **kwargs: None  # noqa: E731
    arch = SimpleNamespace(
        block_idx=lambda: (machine.program, 0, 0), grid_dim=lambda: (machine.programs, 1, 1),
        thread_idx=lambda: (machine.local.lanes, 0, 0), sync_threads=machine.meet,
        make_warp_uniform=lambda x: int(x[0]), sync_warp=nothing, mbarrier_init_fence=nothing,
        fence_proxy=nothing, setmaxregister_increase=nothing, setmaxregister_decrease=nothing,
        shuffle_sync_bfly=lambda x, offset: x[LANES ^ offset],
    )  # fmt: skip
    own = SimpleNamespace(
        partition_A=lambda x: x, partition_B=lambda x: x, make_fragment_B=lambda x: x,
        partition_shape_C=lambda shape: shape, partition_shape_A=lambda shape: shape,
        make_fragment_A=lambda x: x if isinstance(x, Ring) else Registers(machine, x[1] // 2),
    )  # fmt: skip
    cute = SimpleNamespace(
        jit=lambda f: f, kernel=lambda f: f, arch=arch, Pointer=None,
        make_tiled_mma=lambda op: SimpleNamespace(get_slice=lambda thread: own),
        make_rmem_tensor=lambda shape, kind: (
            [None] * shape[0] if kind.name == "Int32"
            else Registers(machine, shape[0] if len(shape) == 1 else shape[1] // 2)
        ),
    )  # fmt: skip
    base = SimpleNamespace(toint=lambda: 0)
    cutlass = SimpleNamespace(
        range=lambda *ends, unroll: range(*map(int, ends)), range_constexpr=range, Uint32=integer,
        Constexpr=None,
        memory=SimpleNamespace(
            SmemAllocator=lambda: SimpleNamespace(allocate=lambda size, byte_alignment: base)
        ),
    )  # fmt: skip
    kind = SimpleNamespace(K_SW128="k", MN_SW128="mn")
    warpgroup = SimpleNamespace(
        SmemLayoutAtomKind=kind, OperandSource=SimpleNamespace(SMEM="s", RMEM="r"),
        wait_group=machine.wait_group,
    )  # fmt: skip
    return {"cutlass": cutlass, "cute": cute, "warpgroup": warpgroup, "Boolean": bool,
            "Int8": None, **kinds}  # fmt: skip


def run(text: str, programs: int, values: list[Any], seed: int) -> None:
    """Run a generated file's kernel on CPU tensors and numbers, in parameter order."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    machine = CuteMachine(seed, tensors)
    names = language(machine)
    body = text[text.index("BITS = {") :]
    for name in ("thread", "lane"):  # the first of a partition acts for all
        body = body.replace(f"if {name} == 0:", f"if bool({name}[0] == 0):")
    exec(compile(body, "generated", "exec"), names)
    names |= replaced(machine)
    for name in {"leave", "load_turned"} & {*names}:
        names[name] = machine.noting(names[name])
    numbers = iter(range(1, len(tensors) + 1))
    flat = [next(numbers) << SPAN if isinstance(v, torch.Tensor) else v for v in values]
    flat += [(len(tensors) + 1) << SPAN, 0]

    def warps(first, count):
        def body():
            machine.local.lanes = first + torch.arange(count)
            names["device"](*flat)

        return body, ()

    machine.programs, threads = programs, 32 * names["WARPS"]
    machine.shared_bytes, each = names["SHARED_BYTES"], names["SCRATCH_BYTES"]
    for machine.program in range(programs):
        scratch = flat[-2] + machine.program * each
        machine.scratch, machine.claims = range(scratch, scratch + each - MAP_BYTES + 1), {}
        machine.barriers, machine.copies, machine.shared, machine.maps = {}, [], {}, {}
        machine.arrived_all = 0
        parts = [warps(0, 32), *(warps(first, 128) for first in range(128, threads, 128))]
        machine.partitions = len(parts)
        machine.specialise(parts, parts[1:], parts[1:])
