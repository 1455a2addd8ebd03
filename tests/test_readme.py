"""What the README shows is what the compiler gives."""

import importlib.util
import re
from pathlib import Path

import attncc as ac

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def declared(tmp_path):
    """The op of the README's first block, from a file of its own."""
    code = re.search(r"```python\n(.*?)\n\nstate, o", README, re.DOTALL)[1]
    path = tmp_path / "first_block.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("first_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.erase_and_write


def test_the_fold_is_the_one_that_is_found(tmp_path):
    shown = re.search(r"<!-- explain:begin -->\n```\n(.*?)```", README, re.DOTALL)[1]
    found = declared(tmp_path).explain()
    assert shown.strip() == found[found.index("fold:") :].strip()


def test_the_excerpt_is_the_generated_kernel(tmp_path):
    block = README[README.index("The heart of the kernel") :]
    lines = re.search(r"```python\n(.*?)```", block, re.DOTALL)[1].splitlines()
    sources = declared(tmp_path).source(sizes={"G": 2, "K": 128, "V": 128})
    (text,) = (t for name, t in sources.items() if "__state__" in name)
    text = text.replace("read0 = tl.dot(q_6, held)", "read0 = tl.dot(q_6, held) * prefix[:, None]")
    for line in lines:
        code = line.split("  # ")[0].strip()
        assert code == "..." or code in text, code


def test_every_op_and_layer_of_the_library_is_named():
    for name in ac.ops.__all__:
        assert f"`{name}`" in README, name
    for name in ("MultiHeadAttention", "GatedDeltaNet", "SparseLatentAttention"):
        assert f"`ac.nn.{name}`" in README and issubclass(getattr(ac.nn, name), ac.nn.LayerModule)


def test_every_file_that_is_named_is_there():
    named = set(re.findall(r"`((?:docs|examples)/[\w/]+\.\w+)`", README))
    assert len(named) > 10
    for path in sorted(named):
        assert (ROOT / path).exists(), path
