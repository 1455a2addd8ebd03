"""Runs generated Gluon files on the CPU: what they compute, and whether their warps keep in step.

There is no interpreter for Gluon. Here a generated file runs as the Python it is, with torch behind
the few names of the language that it uses. Each partition of a program is a thread; one of them
runs at a time, and at every wait, arrival and copy another may go on. Copies arrive at any later
time. A product reads shared memory when it is waited for, the last moment the hardware may. So a
place that is overwritten too early gives a wrong answer, and a phase that is mixed up ends in a
deadlock or in one arrival too many, in some order of the many that the tests draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from random import Random
from types import SimpleNamespace
from typing import Any

import torch


class ProtocolError(AssertionError):
    """The warps of a program do not keep in step."""


class _Stopped(BaseException):
    """Ends the threads of a program that has failed elsewhere."""


@dataclass
class Barrier:
    """A phase ends once ``count`` have arrived and all bytes that were announced have come."""

    count: int
    pending: int = 0
    bytes: int = 0
    completed: int = 0

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, count, announced=0):
        self.pending -= count
        self.bytes += announced
        if self.pending < 0:
            raise ProtocolError("an arrival in a phase that has had all of its own")
        self._settle()

    def arrived(self, number):
        self.bytes -= number
        self._settle()

    def _settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count

    def passed(self, parity):
        """Whether a wait for the phase of that parity returns."""
        return (self.completed & 1) ^ 1 == parity


@dataclass
class Thread:
    """One partition: its turn, and what it waits for."""

    run: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    done: bool = False
    issued: list[Any] = field(default_factory=list)
    stores: int = 0
    warps: int = 4
    copying: list[Any] = field(default_factory=list)


class Machine:
    """One program instance after another, in an order that a seed decides."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.back = threading.Semaphore(0)
        self.program = self.programs = self.warp = 0
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[Callable[[], None]] = []
        self.memory: list[torch.Tensor] = []
        self.local = threading.local()
        self.alone = Thread(lambda: None)
        self.error: BaseException | None = None

    def launch(self, kernel, programs, args, each=1):
        """Run a kernel's program instances; each warp by itself where each works alone."""
        self.programs = programs
        for self.program, self.warp in product(range(programs), range(each)):
            self.barriers, self.copies, self.memory = {}, [], []
            kernel(*args)
            if self.alone.issued:
                raise ProtocolError("a product that nobody waited for")

    # -- partitions

    def specialise(self, partitions, warps, registers):
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        threads = [
            Thread(lambda f=f, a=a: f(*a), warps=n)
            for (f, a), n in zip(partitions, (4, *warps), strict=True)
        ]
        for one in threads:
            threading.Thread(target=self._body, args=(one,), daemon=True).start()
        while not all(t.done for t in threads):
            able = [t for t in threads if not t.done and t.ready()]
            choices = able + self.copies
            if not choices:
                self._stop(threads)
                raise ProtocolError("no warp can go on, and no copy is on its way")
            chosen = self.random.choice(choices)
            if isinstance(chosen, Thread):
                chosen.turn.release()
                self.back.acquire()
            else:
                self.copies.remove(chosen)
                chosen()
            if self.error is not None:
                self._stop(threads)
                raise self.error
        if self.copies:
            raise ProtocolError("a copy arrives after the program has ended")

    def _body(self, thread):
        self.local.thread = thread
        thread.turn.acquire()
        try:
            if self.error is None:
                thread.run()
                if thread.issued:
                    raise ProtocolError("a product that nobody waited for")
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        thread.done = True
        self.back.release()

    def _stop(self, threads):
        self.error = self.error or _Stopped()
        for one in threads:
            if not one.done:
                one.turn.release()
                self.back.acquire()

    def pause(self, ready=lambda: True):
        """Let others go on, at least until this one is ready."""
        thread = getattr(self.local, "thread", None)
        if thread is None:
            return
        thread.ready = ready
        self.back.release()
        thread.turn.acquire()
        if self.error is not None:
            raise _Stopped

    # -- shared memory

    def barrier(self, place):
        return self.barriers[place.data.data_ptr()]

    def init(self, place, count):
        self.barriers[place.data.data_ptr()] = Barrier(count)

    def wait(self, place, parity):
        barrier, parity = self.barrier(place), int(parity)
        assert parity in (0, 1)
        self.pause(lambda: barrier.passed(parity))

    def arrive(self, place, count):
        self.pause()
        self.barrier(place).arrive(count)

    def expect(self, place, number):
        self.pause()
        self.barrier(place).arrive(1, number)

    def copy(self, found, at, place, target):
        barrier = self.barrier(place)
        at = [int(x) for x in at]
        assert tuple(target.data.shape) == tuple(found.box), (at, found.box)

        def arrive():
            target.data.copy_(found.read(at))
            barrier.arrived(found.block_type.nbytes)

        self.copies.append(arrive)
        self.pause()

    def gather(self, target, pointer, mask=None):
        """Copies by the threads of a partition; each element comes at any later time."""
        thread, (memory, at, mask) = self.local.thread, pointer.places(mask)
        assert at.shape == target.data.shape and memory.dtype == target.data.dtype

        def arrive():
            found = memory[torch.where(mask, at, 0)]
            target.data.copy_(torch.where(mask, found, 0))
            thread.copying.remove(arrive)

        thread.copying.append(arrive)
        self.copies.append(arrive)
        self.pause()

    def gathered(self, place, increment_count):
        """Each thread arrives once all copies that it has started are there."""
        thread, barrier = self.local.thread, self.barrier(place)
        assert not increment_count
        before = list(thread.copying)

        def arrive():
            if any(copy in thread.copying for copy in before):
                self.copies.append(arrive)  # not yet
            else:
                barrier.arrive(32 * thread.warps)

        self.copies.append(arrive)
        self.pause()

    def copy_out(self, found, at, source):
        thread, at = self.local.thread, [int(x) for x in at]
        assert tuple(source.data.shape) == tuple(found.box) and min(at) >= 0, (at, found.box)

        def leave():
            found.write(at, source.data)
            thread.stores -= 1

        thread.stores += 1
        self.copies.append(leave)
        self.pause()

    def wait_out(self, pendings):
        thread = self.local.thread
        self.pause(lambda: thread.stores <= pendings)

    def allocate(self, dtype, shape, layout, value=None):
        made = torch.full([int(n) for n in shape], -77, dtype=dtype)
        if value is not None:
            assert value.dtype == dtype and value.shape == made.shape
            made.copy_(value)
        self.memory.append(made)
        return Shared(made)

    # -- products

    def issued(self):
        """Products of this partition that are on their way; of a program that has no others."""
        return getattr(self.local, "thread", self.alone).issued

    def multiply(self, a, b, acc, *, use_acc=True, is_async=False):
        product = Product(a, b, acc if use_acc else None)
        self.issued().append(product)
        assert is_async
        self.pause()
        return product

    def finish(self, outstanding, deps):
        issued = self.issued()
        self.pause()
        found = tuple(d.value() for d in deps)
        while len(issued) > outstanding:
            assert issued.pop(0).done, "a product is over and its result was not taken"
        return found[0] if len(found) == 1 else found


@dataclass
class Product:
    """A product on its way; its operands in shared memory are read when it is waited for.

    What it adds to may be one that is on its way too: the last one of a row is waited for.
    """

    a: Any
    b: Any
    acc: Any
    done: bool = False

    def value(self):
        assert not self.done
        self.done = True
        left, right = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
        before = self.acc.value() if isinstance(self.acc, Product) else self.acc
        found = left.float() @ right.float()
        return found if before is None else before + found


@dataclass
class Shared:
    """A piece of shared memory."""

    data: torch.Tensor

    def index(self, i):
        return Shared(self.data[int(i)])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype, shape, layout):
        """Copies ``[places, 1, rows, columns]`` as blocks ``[stages, rows, columns]``.

        Columns of 128 bytes lie behind each other, and so do rows of one such group. Other types
        take the whole place, whatever it held.
        """
        if dtype != self.data.dtype:
            found = self.data.view(-1).view(dtype)
            assert found.numel() == prod(shape)
            return Shared(found.view(shape))
        stages, rows, columns = shape
        _, one, _, chunk = self.data.shape
        assert one == 1 and dtype == self.data.dtype
        assert self.data.numel() == stages * rows * columns
        groups = (stages, columns // chunk, rows, chunk)
        return Seen(lambda: self.data.view(groups).transpose(1, 2).reshape(shape))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Seen(Shared):
    """Shared memory in another order of its elements, as it is when somebody looks."""

    def __init__(self, look):
        self.look = look

    @property
    def data(self):
        return self.look()

    def index(self, i):
        i = int(i)
        return Seen(lambda: self.look()[i])

    def reshape(self, shape):
        return Seen(lambda: self.look().view(shape))

    def permute(self, order):
        return Seen(lambda: self.look().permute(order))


# --- global memory ---------------------------------------------------------------------------


class Pointer:
    """A tensor's memory from its first element on, and offsets into it."""

    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more):
        return Pointer(self.tensor, self.offset + more)

    def __getitem__(self, key):
        return Pointer(self.tensor, self.offset[key])

    def to(self, dtype):
        """An address as a number, which is as good as a pointer here."""
        assert dtype == torch.int64
        return self

    def memory(self):
        start = self.tensor.storage_offset()
        room = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - start
        return torch.as_strided(self.tensor, (room,), (1,), start)

    def places(self, mask):
        at = torch.as_tensor(self.offset).long()
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
        at, mask = torch.broadcast_tensors(at, mask)
        memory = self.memory()
        inside = (at >= 0) & (at < memory.numel())
        assert (inside | ~mask).all(), "an address outside of the tensor"
        return memory, at, mask


def load(pointer, mask=None, other=0):
    memory, at, mask = pointer.places(mask)
    if not memory.numel():
        return torch.full(at.shape, other, dtype=memory.dtype)
    return torch.where(mask, memory[torch.where(mask, at, 0)], other).to(memory.dtype)


def store(pointer, value, mask=None):
    memory, at, mask = pointer.places(mask)
    assert value.dtype == memory.dtype
    memory[at[mask]] = torch.broadcast_to(value, at.shape)[mask]


class TensorMap:
    """A tensor in global memory and the box that a copy of it brings; zeros beyond its end."""

    def __init__(self, pointer, shape, strides, box, layout):
        self.shape, self.strides = ([int(n) for n in x] for x in (shape, strides))
        self.pointer, self.box = pointer, box
        size = pointer.tensor.element_size()
        assert min(self.shape) > 0 and self.strides[-1] == 1 and max(box) <= 256
        assert all(s * size % 16 == 0 for s in self.strides[:-1])
        count = 1
        for n in box:
            assert n & (n - 1) == 0
            count *= n
        self.block_type = SimpleNamespace(nbytes=count * size)

    def read(self, at):
        offset, inside = self.places(at)
        return load(self.pointer + offset, mask=inside)

    def write(self, at, data):
        offset, inside = self.places(at)
        store(self.pointer + offset, data, mask=inside)

    def places(self, at):
        """Offsets of a box's elements, and whether each lies within the tensor."""
        rank = len(self.box)
        offset = torch.zeros([1] * rank, dtype=torch.long)
        inside = torch.ones([1] * rank, dtype=torch.bool)
        for d in range(rank):
            line = at[d] + torch.arange(self.box[d])
            line = line.view([-1 if i == d else 1 for i in range(rank)])
            offset = offset + line * self.strides[d]
            inside = inside & (line >= 0) & (line < self.shape[d])
        return offset, inside


# --- the language ----------------------------------------------------------------------------


def _reduced(whole, along):
    return lambda x, axis=None: whole(x) if axis is None else along(x, axis)


def _pair(function):
    def of(a, b, propagate_nan=None):
        return function(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    return of


def _where(condition, a, b):
    """A choice; a number takes the other side's type, as in Triton."""
    if isinstance(a, float) and isinstance(b, float):
        a = torch.tensor(a, dtype=torch.float32)
    return torch.where(torch.as_tensor(condition), a, b)


def _counted(*ends):
    """A loop of the kernel: its variable is a number on the device."""
    return (torch.tensor(i, dtype=torch.int32) for i in range(*map(int, ends)))


def _scan(x, axis, combine):
    """A cumulative combination, one place after the other."""
    rows = list(x.unbind(axis))
    for i in range(1, len(rows)):
        rows[i] = combine(rows[i - 1], rows[i])
    return torch.stack(rows, axis)


def _broadcast(a, b):
    """Both of one shape; the first may be addresses."""
    if not isinstance(a, Pointer):
        return torch.broadcast_tensors(a, b)
    offset, b = torch.broadcast_tensors(a.offset, b)
    return Pointer(a.tensor, offset), b


def _assembly(machine, text, constraints, args, dtype, is_pure, pack):
    """The instructions that generated files name."""
    if text == "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;":
        return torch.tensor(machine.warp, dtype=torch.int32)
    if text == "mov.b32 $0, $1;":
        return args[0]
    if "and.b32 high, $1, 0xffff0000; sub.rn.f32 $0, $1, high;" in text:
        return args[0] - (args[0].view(torch.int32) & -65536).view(torch.float32)
    if "st.relaxed.gpu.global.b32 [$1], 1;" in text:
        return store(args[0], torch.tensor(1, dtype=torch.int32))
    if "ld.acquire.gpu.global.b32 seen, [$1];" in text:
        if load(args[0]) != 1:
            raise ProtocolError("results are waited for that nobody will leave")
        return args[0].offset
    assert dtype == torch.float32 and constraints == "=r,r,r"
    assert "and.b32 s, $1, 0x80000000; xor.b32 $0, $2, s;" in text
    x, y = args
    return torch.where(torch.signbit(x), -y, y)


def _multiply(a, b, acc):
    """A product of registers; operands are of 16 bits."""
    assert a.dtype == b.dtype and a.dtype.itemsize == 2 and acc.dtype == torch.float32
    return acc + a.float() @ b.float()


def language(machine: Machine) -> dict[str, Any]:
    """The names that a generated file imports."""
    gl = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, num_warps=lambda: 4,
        program_id=lambda axis: torch.tensor(machine.program, dtype=torch.int32),
        num_programs=lambda axis: machine.programs,
        to_tensor=lambda x: torch.as_tensor(x, dtype=torch.int32),
        allocate_shared_memory=machine.allocate, warp_specialize=machine.specialise,
        convert_layout=lambda x, layout: x.clone(),
        arange=lambda a, b, layout: torch.arange(a, b, dtype=torch.int32),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        fma=lambda a, b, c: a * b + c, inline_asm_elementwise=partial(_assembly, machine),
        cast=lambda x, dtype, bitcast: x.view(dtype), associative_scan=_scan,
        reshape=lambda x, shape: x.reshape(shape), broadcast=_broadcast,
        join=lambda a, b: torch.stack((a, b), -1),
        permute=lambda x, order: x.permute(order), split=lambda x: (x[..., 0], x[..., 1]),
        load=load, store=store, where=_where, maximum=_pair(torch.maximum),
        minimum=_pair(torch.minimum), cdiv=lambda a, b: (a + b - 1) // b,
        max=_reduced(torch.amax, torch.amax), min=_reduced(torch.amin, torch.amin),
        sum=_reduced(torch.sum, torch.sum), exp=torch.exp, exp2=torch.exp2, log=torch.log,
        log2=torch.log2, abs=torch.abs, sqrt=torch.sqrt, rsqrt=torch.rsqrt, floor=torch.floor,
        int8=torch.int8, int16=torch.int16, int32=torch.int32, int64=torch.int64,
        float32=torch.float32,
        float16=torch.float16, bfloat16=torch.bfloat16,
        **dict.fromkeys(
            ("NVMMASharedLayout", "NVMMADistributedLayout", "SliceLayout", "DotOperandLayout",
             "BlockedLayout", "SwizzledSharedLayout"), lambda *args, **kwargs: None,
        ),
    )  # fmt: skip
    return {
        "gl": gl,
        "gluon": SimpleNamespace(jit=lambda f: f),
        "range": _counted,
        "tl": SimpleNamespace(PropagateNan=SimpleNamespace(ALL=None)),
        "tma": SimpleNamespace(
            make_tensor_descriptor=TensorMap,
            async_copy_global_to_shared=machine.copy,
            async_copy_shared_to_global=machine.copy_out, store_wait=machine.wait_out,
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=machine.init, wait=machine.wait,
            arrive=machine.arrive, expect=machine.expect,
        ),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=machine.gather, mbarrier_arrive=machine.gathered,
        ),
        "fence_async_shared": lambda: None,
        "gdc_launch_dependents": lambda: None,
        "mma_v2": _multiply,
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.finish,
    }  # fmt: skip


def run(text: str, entry: str, programs: int, args: list[Any], seed: int) -> None:
    """Run a generated file's kernel.

    Args:
        text: the file.
        entry: the kernel's name.
        programs: program instances.
        args: tensors and numbers in the order of the kernel's parameters.
        seed: decides the order in which warps and copies go on.

    Raises:
        ProtocolError: the warps do not keep in step in this order.
    """
    machine = Machine(seed)
    names = language(machine)
    lines = [x for x in text.splitlines() if not x.startswith(("import ", "from "))]
    exec(compile("\n".join(lines), entry, "exec"), names)
    values = [
        Pointer(x) if isinstance(x, torch.Tensor)
        else torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float32)
        for x in args
    ]  # fmt: skip
    machine.launch(names[entry], programs, values, names.get("EACH", 1))
