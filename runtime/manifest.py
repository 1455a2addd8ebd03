"""An entry's manifest: how to load and launch its artifact, and a hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MANIFEST = "manifest.json"
_FAMILY = re.compile(r"sm_(\d+)([af]?)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a loader must know of a kernel, whichever Python or compiler is there.

    Attributes:
        entry: name of the function in the artifact.
        target: what it was asked for, such as ``sm_90`` (``source``: there is no artifact).
        family: what the artifact runs on: ``sm_90a`` on 9.0 alone, ``sm_100f`` on 10.x, ``sm_80``
            on 8.0 and later 8.x.
        parameters: the kernel's parameters in order, name and type (``*bf16``, ``i64``, ``fp32``);
            two scratch pointers follow them.
        num_warps: warps of 32 threads a program instance.
        shared_bytes: dynamic shared memory a program instance.
        scratch_bytes: global scratch a program instance.
        tensor_maps: how the kernel gets them: ``none``, or ``device``: each program encodes its own
            in its scratch from pointers, sizes and strides among the parameters. Maps that the host
            would have to encode have no place in a parameter buffer; such a kernel is not stored.
        chained: the kernel waits by itself for the one ahead of it, and may be launched early.
        registers: 32-bit registers a thread, if known.
        spill_bytes: bytes of spill stores, if known.
        versions: the toolchain that built it.
        files: sha256 of each other file by name.
    """

    entry: str
    target: str
    family: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    num_warps: int = 0
    shared_bytes: int = 0
    scratch_bytes: int = 0
    tensor_maps: str = "none"
    chained: bool = False
    registers: int | None = None
    spill_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def artifact(self) -> str:
        """Name of the compiled file."""
        return f"kernel.{self.target}.cubin"

    def to_json(self) -> str:
        """As text, sorted, so that equal manifests are equal files."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


_TYPES: dict[str, tuple[type, ...]] = {
    "entry": (str,), "target": (str,), "family": (str,), "parameters": (list,),
    "num_warps": (int,), "shared_bytes": (int,), "scratch_bytes": (int,),
    "tensor_maps": (str,), "chained": (bool,),
    "registers": (int, type(None)), "spill_bytes": (int, type(None)), "versions": (dict,),
    "files": (dict,),
}  # fmt: skip


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: it is not one; the message says what is wrong.
    """
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"unreadable manifest: {error}") from error
    if not isinstance(found, dict) or set(found) != set(_TYPES):
        raise ValueError("the manifest has other fields than this version writes")
    for name, types in _TYPES.items():
        if not isinstance(found[name], types):
            raise ValueError(f"manifest: {name} is {found[name]!r}")
    if found["tensor_maps"] not in ("none", "device"):
        raise ValueError(f"manifest: tensor_maps is {found['tensor_maps']!r}")
    pairs = found["parameters"]
    if not all(isinstance(p, list) and [type(x) for x in p] == [str, str] for p in pairs):
        raise ValueError("manifest: parameters are pairs of name and type")
    if any("/" in name or name.startswith(".") for name in found["files"]):
        raise ValueError("manifest: a file outside the entry")
    found["parameters"] = tuple((name, kind) for name, kind in pairs)
    return Manifest(**found)


def sha256(data: bytes) -> str:
    """Hash of a file's content."""
    return hashlib.sha256(data).hexdigest()


def serves(family: str, capability: int) -> bool:
    """Whether an artifact of a family runs on a device (compute capability times ten)."""
    match = _FAMILY.fullmatch(family)
    if match is None:
        return False
    number, kind = int(match[1]), match[2]
    if kind == "a":
        return capability == number
    return capability // 10 == number // 10 and capability >= number
