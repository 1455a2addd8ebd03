"""A serving loop: pages and states with owners, a forked prefix, drafts that are taken back.

A hybrid of two layers serves more requests than it has rows for. Attention keeps a row of keys and
values for every token, in pages; the gated delta rule keeps one state for a request, in a slot. The
two owners know a request by the same number, and each gives its memory back in its own way. Every
request starts with the same instructions, which are computed once and forked. Each step feeds three
tokens of every request: the one that is known and two drafts, of which some are wrong.
"""

import itertools
from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid, normalize

import attncc as ac

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
VOCABULARY, WIDTH, HEADS, GROUP, DIM = 50, 32, 2, 2, 16
ROWS, FED, PAGE, PAGES, CAPACITY = 3, 3, 8, 22, 96
SLOTS = 1 + ROWS * (1 + FED)  # the instructions, and for each row its state and its drafts'


class Model:
    """Two layers on random weights; how a layer looks at the past is the caller's business."""

    def __init__(self):
        def weight(*shape):
            return torch.randn(*shape) * shape[0] ** -0.5

        wide, narrow = HEADS * GROUP * DIM, HEADS * DIM
        self.embed = torch.randn(VOCABULARY, WIDTH)
        self.attention = [weight(WIDTH, n) for n in (wide, narrow, narrow)]
        self.attention_out = weight(wide, WIDTH)
        self.delta = [weight(WIDTH, n) for n in (narrow, narrow, wide)]
        self.gates = [weight(WIDTH, HEADS * GROUP) for _ in range(2)]
        self.delta_out = weight(wide, WIDTH)

    def __call__(self, tokens, cache=None, states=None, phase="prefill", **options):
        """Outputs of tokens ``[B, T]``, or ``[T]`` with ``cu_seqlens``."""
        x = self.embed[tokens]
        q, k, v = (heads(x @ w) for w in self.attention)
        o = getattr(ATTENTION, phase)(q, k, v, cache=cache, **options)
        x = x + o.flatten(-2) @ self.attention_out
        q, k, v = (heads(x @ w) for w in self.delta)
        g, beta = (x @ w for w in self.gates)
        args = normalize(q, dim=-1), normalize(k, dim=-1), v, logsigmoid(g + 2), beta.sigmoid()
        result = getattr(GDR, phase)(*args, **(states or {}), **options)
        o = result if states else result.o  # a state without an owner comes back
        return x + o.flatten(-2) @ self.delta_out


def heads(x):
    """The last axis as heads."""
    return x.unflatten(-1, (-1, DIM))


@dataclass
class Request:
    """What a user sends, and what the model would say to it: ``text`` is prompt and answer."""

    text: torch.Tensor
    prompt: int
    handle: int = -1
    outputs: list[torch.Tensor] = field(default_factory=list)


class Server:
    """The loop: requests are admitted, fed and retired."""

    def __init__(self, model, instructions):
        self.model = model
        sizes = {"Hkv": HEADS, "D": DIM, "E": DIM, "Hk": HEADS, "G": GROUP, "K": DIM, "V": DIM}
        page = ac.bytes_of(ATTENTION, sizes=sizes, page=PAGE, dtype=torch.float32).page
        state = ac.bytes_of(GDR, sizes=sizes).sequence
        print(f"a page of {PAGE} tokens takes {page} bytes, a state {state}")
        self.pages = ac.PageOwner.allocate(
            ATTENTION, sizes=sizes, pages=PAGES, page=PAGE, dtype=torch.float32
        )
        self.states = ac.StateOwner.allocate(GDR, sizes=sizes, slots=SLOTS)
        self.tables = self.pages.batch(ROWS, CAPACITY, tokens=FED)
        self.slots = self.states.batch(ROWS, tokens=FED)
        self.rows: list[Request | None] = [None] * ROWS
        self.first = self.pages.add()
        self.states.add(handle=self.first)
        self.prefill([self.first], [instructions])

    def prefill(self, handles, parts):
        """Sequences of any length in one call."""
        counts = [len(p) for p in parts]
        cu = torch.tensor([0, *itertools.accumulate(counts)])
        with self.pages.append(handles, counts) as cache:
            states = self.states.view(handles)
            o = self.model(torch.cat(parts), cache, states, cu_seqlens=cu)
        return o.split(counts)

    def admit(self, waiting):
        """Give free rows to requests that wait, as long as there are pages for all they will say.

        Whoever gets in has every page it can need, so that no step runs out of them.
        """
        new = []
        for row in (r for r, request in enumerate(self.rows) if request is None):
            if not waiting:
                break
            handle = self.pages.fork(self.first)
            try:
                self.pages.reserve([handle], len(waiting[0].text) + FED - self.pages.length(handle))
            except ac.ExhaustedError as error:
                print(f"a request waits: {error.message}")
                self.pages.release(handle)
                break
            self.states.fork(self.first, child=handle)
            request = waiting.pop(0)
            request.handle = handle
            self.rows[row] = request
            new.append(request)
        if new:
            held = self.pages.length(self.first)
            parts = [r.text[held : r.prompt] for r in new]
            for request, o in zip(new, self.prefill([r.handle for r in new], parts), strict=True):
                request.outputs.append(o)

    def step(self, right):
        """Feed three tokens of every request, of whose two drafts so many are right."""
        tokens = torch.zeros(ROWS, FED, dtype=torch.int64)
        accepted = [0] * ROWS
        handles = [None if r is None else r.handle for r in self.rows]
        for row, request in enumerate(self.rows):
            if request is None:
                continue
            length = self.pages.length(request.handle)
            accepted[row] = min(1 + right[row], len(request.text) - length)
            text = request.text[length : length + accepted[row]]
            tokens[row, : len(text)] = text
            tokens[row, len(text) :] = torch.randint(VOCABULARY, (FED - len(text),))
        self.tables.set(handles)
        self.slots.set(handles)
        self.slots.speculate()
        with self.tables.append(FED) as cache:
            o = self.model(tokens, cache, self.slots.arguments, phase="decode")
        self.slots.accept(accepted)
        for row, request in enumerate(self.rows):
            if request is not None:
                request.outputs.append(o[row, : accepted[row]])
                left = self.pages.length(request.handle) - FED + accepted[row]
                self.pages.truncate(request.handle, left, give_back=False)
        return sum(accepted), FED * sum(r is not None for r in self.rows)

    def retire(self):
        """Requests that are answered give everything back."""
        for row, request in enumerate(self.rows):
            if request and self.pages.length(request.handle) == len(request.text):
                self.pages.release(request.handle)
                self.states.release(request.handle)
                self.rows[row] = None


def main():
    """Serve eight requests in three rows and compare each with a run of its own."""
    torch.manual_seed(0)
    model = Model()
    instructions = torch.randint(VOCABULARY, (21,))
    requests = []
    for prompt, answer in ((5, 9), (30, 20), (1, 12), (17, 4), (2, 40), (9, 9), (25, 13), (3, 1)):
        own = torch.randint(VOCABULARY, (prompt + answer,))
        requests.append(Request(torch.cat([instructions, own]), len(instructions) + prompt))
    server = Server(model, instructions)
    waiting, steps, kept, fed = list(requests), 0, 0, 0
    while waiting or any(server.rows):
        server.admit(waiting)
        a, b = server.step(torch.randint(FED, (ROWS,)).tolist())
        steps, kept, fed = steps + 1, kept + a, fed + b
        server.retire()
    print(f"{len(requests)} requests in {steps} steps; {kept} of {fed} tokens fed were kept")

    worst = 0.0
    for request in requests:
        alone = model(request.text[None])[0, len(instructions) :]
        worst = max(worst, (torch.cat(request.outputs) - alone).abs().max().item())
    print(f"largest difference from each request on its own: {worst:.1e}")
    assert worst < 1e-4
    server.tables.close()
    for owner in (server.pages, server.states):
        owner.release(server.first)
        assert not owner.handles
    assert (server.pages.free, server.states.free) == (PAGES, SLOTS)


if __name__ == "__main__":
    main()
