"""A recurrence that is not in the library, from ten lines to compiled kernels, without a GPU."""

import argparse
import inspect
import os
import subprocess
import sys
import time

import torch

import attncc as ac


@ac.op(scan="T", out="B T (Hk G) V")
def erase_and_write(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    g=ac.Activation("B T (Hk G)", default=0),
    erase=ac.Activation("B T (Hk G)"),
    write=ac.Activation("B T (Hk G)"),
    z=ac.Activation("B T (Hk G) V"),
    s=ac.State("B (Hk G) K V"),
):
    """A delta rule that erases and writes with different strengths, and gates what it reads."""
    s = ac.exp(g) * s
    s = s + k * (write * v - erase * ac.dot(s, k, "K"))
    return s, ac.silu(z) * ac.dot(s, q, "K") * ac.rsqrt("K")


SIZES = {"Hk": 2, "G": 2, "K": 64, "V": 64}


def inputs(tokens, dtype=torch.float32):
    """Random arguments of one sequence."""
    torch.manual_seed(0)
    hk, g, k, v = SIZES.values()

    def unit(*shape):
        return torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(dtype)

    gates = torch.nn.functional.logsigmoid(torch.randn(1, tokens, hk * g) + 3)
    erase, write = torch.rand(2, 1, tokens, hk * g)
    wide = torch.randn(2, 1, tokens, hk * g, v).to(dtype)
    return unit(1, tokens, hk, k), unit(1, tokens, hk, k), wide[0], gates, erase, write, wide[1]


def report(label, result, exact):
    """Print the largest error of state and output against fp64."""
    parts = []
    for name in ("s", "o"):
        x, ref = getattr(result, name).double(), getattr(exact, name)
        parts.append(f"{name} {(x - ref).abs().max() / ref.abs().max():.1e}")
    print(f"{label:<44} {'   '.join(parts)}")


def child():
    """In a process of its own: the generated kernels in Triton's interpreter, on the CPU."""
    cases = (("prefill, 130 tokens", 130, "prefill"), ("decode, 1", 1, "decode"))
    for label, tokens, phase in cases:
        args = inputs(tokens)
        result = getattr(erase_and_write, phase)(*args, backend="triton")
        report(f"generated Triton kernel ({label})", result, erase_and_write.reference(*args))


def show_kernels():
    """Generate, print and compile the kernels for two GPUs that are not here."""
    from attncc.runtime.backends import sources
    from attncc.runtime.inspect import resources
    from attncc.runtime.kernels import compile_source, load

    big = {**SIZES, "K": 128, "V": 128}
    head = f"{'regs':>4} {'shared':>7} {'spill':>5} {'tensor':>8} {'s':>5}"
    print(f"\n{'kernel':<44} {'target':<7} {head}")
    last = None
    for phase in ("prefill", "decode"):
        for source in sources(erase_and_write.declaration, sizes=big, phase=phase):
            kernel = load(source)
            last = kernel if phase == "prefill" else last
            for capability in (90, 100):
                start = time.perf_counter()
                r = resources(
                    compile_source(source, kernel.function, capability), f"sm_{capability}"
                )
                spent = time.perf_counter() - start
                spill = r.spill_store_bytes + r.spill_load_bytes
                print(
                    f"{source.entry:<44} sm_{capability:<4} {r.registers:>4} {r.shared_bytes:>7} "
                    f"{spill:>5} {r.tensor_core or '-':>8} {spent:>5.1f}"
                )
    assert last is not None
    print(f"\nThe state pass, as generated ({last.path.name} in the kernel store):\n")
    print(last.source.text)


def main(argv=()):
    """Declare, explain, generate, compile, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true", help="run the interpreter part only")
    if parser.parse_args(argv).child:
        return child()
    print("== what was written\n")
    print(inspect.getsource(erase_and_write.declaration.body))
    print("== what the compiler sees, and the fold it found\n")
    print(erase_and_write.explain())
    print("== kernels for machines that are not here (bf16, K = V = 128)")
    show_kernels()
    print("== largest errors against the fp64 reference, relative to the largest value (fp32)\n")
    args = inputs(130)
    exact = erase_and_write.reference(*args)
    report("torch lowering (prefill, 130 tokens)", erase_and_write(*args), exact)
    sys.stdout.flush()
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, "--child"], env=env, check=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
