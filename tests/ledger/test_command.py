"""``attncc ledger`` and ``attncc show --graph``: what they print, and their exit codes."""

import json

import pytest

import attncc as ac
from attncc.dsl.library.layers import LAYERS
from attncc.dsl.picture import svg, text
from attncc.runtime import commands

SIZES = ["--sizes", "B=1,Hkv=32,G=1,D=128,E=128", "--sizes", "S=8192"]


def ran(capsys, *arguments):
    """Exit code, standard output and standard error of the command."""
    code = commands.run([str(a) for a in arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def test_text_is_the_ops_own(capsys):
    code, out, err = ran(capsys, "ledger", "attention", *SIZES, "--layers", 32)
    sizes = {"B": 1, "Hkv": 32, "G": 1, "D": 128, "E": 128, "S": 8192}
    assert (code, err) == (0, "")
    assert out == ac.ops.attention.ledger(sizes, "decode", layers=32).text()
    assert "M_persistent_cache_or_state  4,294,967,296" in out


def test_json_has_every_object(capsys):
    code, out, _ = ran(capsys, "ledger", "attention", *SIZES, "--json", "--phase", "prefill")
    found = json.loads(out)
    assert code == 0 and found["phase"] == "prefill"
    objects = {o["name"]: o for o in found["objects"]}
    assert objects["k"]["lifetime"] == "cache" and objects["k"]["growth"] == "O(T)"
    assert objects["k"]["bytes"] == {"formula": "B * S * Hkv * D * 2", "one_layer": 67_108_864}
    assert objects["dot0"]["row"] is None and objects["dot0"]["memory"] == "fused"
    assert objects["score"]["consumers"] == ["mask"]
    assert sum(i["bytes"] for i in found["peak"]) == found["peak_bytes"]


def test_storage_pages_and_rows_on_the_command_line(capsys):
    arguments = ["ledger", "sliding_window", *SIZES, "--sizes", "w=100", "--json"]
    more = ["--dtype", "k=e4m3/64/ue8m0,v=fp32", "--page", 16, "--keep", "v=128"]
    code, out, err = ran(capsys, *arguments, *more)
    assert code == 0, err
    objects = {o["name"]: o for o in json.loads(out)["objects"]}
    assert objects["k"]["dtype"] == "e4m3" and objects["k.scales"]["dtype"] == "ue8m0"
    assert objects["k.scales"]["bytes"]["one_layer"] == 8192 * 32 * 2
    assert objects["v"]["bytes"]["one_layer"] == 128 * 32 * 128 * 4
    assert objects["block_table"]["bytes"]["one_layer"] == 8192 // 16 * 4


def test_layers_and_ops_of_the_users_own(capsys, tmp_path, monkeypatch):
    code, out, _ = ran(capsys, "ledger", "mha_decode", "--markdown")
    assert code == 0 and "| Historical Key/Value | K_cache, V_cache / k_cache, v_cache |" in out
    assert out == ac.ledger(LAYERS["mha_decode"]).markdown()
    (tmp_path / "my_ledger_ops.py").write_text(
        "import attncc as ac\n\n\n"
        "@ac.op(scan='T', out='B T H')\n"
        "def total(x=ac.Activation('B T H'), s=ac.State('B H')):\n"
        "    s = s + x\n"
        "    return s, s * 1.0\n\n\n"
        "@ac.layer\n"
        "def summed(n):\n"
        "    h = n.input('h', 'B T M')\n"
        "    return n.project('proj', h, 'y', 'B T D')\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = ran(capsys, "ledger", "my_ledger_ops:total")
    assert code == 0 and "previous step, s + x" in out
    code, out, _ = ran(capsys, "ledger", "my_ledger_ops:summed", "--phase", "train")
    assert code == 0 and out.startswith("summed, train")
    assert ran(capsys, "ledger", "my_ledger_ops:ac")[0] == 2


def test_inputs_that_are_absent(capsys):
    sizes = "B=2,Hk=2,G=1,K=8,V=8"
    code, out, _ = ran(
        capsys, "ledger", "gated_delta_rule", "--without", "g,beta", "--json", "--sizes", sizes
    )
    names = {o["name"] for o in json.loads(out)["objects"]}
    assert code == 0 and {"q", "s", "read0"} <= names and not names & {"g", "beta", "s'"}
    assert ran(capsys, "ledger", "gated_delta_rule", "--without", "q")[0] == 2
    assert ran(capsys, "ledger", "mha_decode", "--without", "q")[0] == 2


def test_comparison(capsys):
    names = ["attention", "sparse_mla", "gated_delta_rule"]
    code, out, _ = ran(capsys, "ledger", "--compare", *names)
    assert code == 0 and "the 2048 selected rows of c, r" in out
    code, out, _ = ran(capsys, "ledger", "--compare", *names, "--markdown")
    assert out.splitlines()[0] == "|  | attention | sparse_mla | gated_delta_rule |"
    code, out, _ = ran(capsys, "ledger", "--compare", *names, "--json")
    assert json.loads(out)["gated_delta_rule"]["Grows with the context"] == "no: fixed size"


def test_pictures(capsys):
    code, out, _ = ran(capsys, "show", "mha_decode", "--graph", "svg")
    assert code == 0 and out == svg(LAYERS["mha_decode"])
    assert ran(capsys, "show", "mha_decode")[1] == text(LAYERS["mha_decode"])
    code, out, _ = ran(capsys, "show", "attention", "--graph", "text")
    assert code == 0 and out == text(ac.ops.attention.declaration)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["attention", "--phase", "train", "--page", "16"], 2, "no place in autograd"),
        (
            ["attention", "--phase", "train", "--dtype", "k=e4m3"],
            2,
            "there is no cache in training",
        ),
        (["attention", "--phase", "test"], 2, "no such phase"),
        (["attention", "--sizes", "B=1"], 2, "a size is missing"),
        (["sparse_mla", "--keep", "c=2048"], 1, "the next query selects anew"),
        (["gated_delta_rule", "--keep", "s=1"], 2, "cannot be indexed by token"),
        (["attention", "--keep", "k"], 2, "--keep takes HISTORY=ROWS"),
        (["attention", "--dtype", "fp8"], 2, "no storage 'fp8'"),
        (["attention", "--dtype", "bf16,k=e4m3"], 2, "one storage for all"),
        (["attention", "mla"], 2, "with --compare"),
        (["attention", "mla", "--compare", "--page", "16"], 2, "takes no --page"),
        (["nothing"], 2, "layers are mha_decode"),
        (["nothing:there"], 2, "no op"),
    ],
)
def test_a_wrong_command_is_one_message(capsys, arguments, code, says):
    found, out, err = ran(capsys, "ledger", *arguments)
    assert (found, out) == (code, "") and says in err and "Traceback" not in err
