"""The table of what compiled kernels need, from kernels compiled here."""

import pytest

from benchmarks import cli, resources, table
from benchmarks.resources import Work


def test_a_line_a_kernel_and_a_line_a_refusal(tmp_path):
    works = (
        Work("silu", "prefill", {"V": 64}),
        Work("attention", "prefill", {"D": 64, "E": 64, "G": 1}, "cutedsl"),
    )
    found = list(resources.rows(works, ("sm_100",)))
    assert all(len(row) == len(resources.HEAD) for row in found)
    compiled, refused = found
    assert compiled[:2] == ["silu prefill", "V64"] and compiled[3:5] == ["triton", "sm_100a"]
    warps, registers, shared, spills = map(int, compiled[5:])
    assert warps in (1, 2, 4, 8) and 16 <= registers <= 255 and shared >= 0 == spills
    assert refused[0] == "attention prefill, cutedsl" and "sm_90, not sm_100" in refused[2]

    document = tmp_path / "document.md"
    document.write_text("\n".join(["before", *table.RESOURCES, "after"]))
    table.write(document, resources.markdown(iter(found)), table.RESOURCES)
    lines = document.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and len(lines) == 8
    assert lines[2] == table.line(resources.HEAD) and lines[4] == table.line(compiled)


def test_every_work_is_an_op_of_the_library():
    from attncc import ops

    for work in resources.WORKS:
        program = getattr(ops, work.op).declaration.trace()
        axes = {a for tensor in program.tensors for a in tensor.pattern.axes}
        assert axes & set(work.sizes) - {"B", "T", "S"}, work


def test_a_document_without_a_place_is_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(resources, "WORKS", ())
    document = tmp_path / "document.md"
    document.write_text("no markers")
    assert cli.main(["resources", "--write", str(document)]) == 2
    assert "resources:begin" in capsys.readouterr().err
    assert document.read_text() == "no markers"


@pytest.mark.parametrize("markers", [table.RESOURCES, (table.BEGIN, table.END)])
def test_tables_keep_to_their_own_markers(markers):
    both = "\n".join([table.BEGIN, "x", table.END, table.RESOURCES[0], "y", table.RESOURCES[1]])
    changed = table.insert(both, "new\n", markers)
    lines = changed.splitlines()
    assert lines[lines.index(markers[0]) + 1] == "new" and len(lines) == 6
    assert ("x" in lines) == (markers == table.RESOURCES) and ("y" in lines) != ("x" in lines)
