"""The library's layers by their usual names and sizes."""

from __future__ import annotations

from typing import Any

from attncc.dsl.composition import Composition
from attncc.dsl.errors import SizeError
from attncc.dsl.library.layers import COMPOSITIONS
from attncc.runtime.nn.module import LayerModule


def _group(layer: str, heads: int, shared: int) -> int:
    if shared < 1 or heads % shared:
        raise SizeError(
            "heads do not divide into groups", op=layer, axis="G",
            expected=f"a multiple of {shared}", found=heads,
        )  # fmt: skip
    return heads // shared


class MultiHeadAttention(LayerModule):
    """Causal attention from h_t to W_O with RoPE; MHA, GQA and MQA are the numbers of heads."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, dim: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Sizes of the layer.

        Args:
            width: of the model.
            heads: query heads.
            kv_heads: heads of keys and values; as many if None.
            dim: of a head; ``width // heads`` if None.
            **options: as :class:`LayerModule`.

        Raises:
            SizeError: the query heads are no multiple of the others.
        """
        shared = heads if kv_heads is None else kv_heads
        group = _group("mha_decode", heads, shared)
        each = width // heads if dim is None else dim
        sizes = {"M": width, "Hkv": shared, "G": group, "D": each}
        super().__init__(COMPOSITIONS["mha_decode"], sizes, **options)


class SparseLatentAttention(LayerModule):
    """An indexer and latent attention over the rows that it selects, absorbed."""

    def __init__(
        self, width: int, heads: int, *, query_rank: int, latent: int = 512, rope_dim: int = 64,
        nope_dim: int = 128, value_dim: int = 128, index_heads: int = 64, index_dim: int = 128,
        scale: float | None = None, composition: Composition | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Sizes of the layer.

        Args:
            width: of the model.
            heads: of the main attention.
            query_rank: of the queries' latent.
            latent: of keys and values.
            rope_dim: of the part with RoPE, in the indexer the first elements of each head.
            nope_dim: of the part without.
            value_dim: of a head's value.
            index_heads: of the indexer.
            index_dim: of a head of it.
            scale: of the scores; ``(nope_dim + rope_dim) ** -0.5`` if None.
            composition: the layer around another op, which selects another number of rows.
            **options: as :class:`LayerModule`.
        """
        sizes = {
            "M": width, "H": heads, "Rq": query_rank, "R": latent, "P": rope_dim, "D": nope_dim,
            "V": value_dim, "Hi": index_heads, "Di": index_dim,
        }  # fmt: skip
        turned: dict[str, float] = {"rotated": rope_dim}
        usual = (nope_dim + rope_dim) ** -0.5
        settings: dict[str, dict[str, float]] = {
            "attend": {"scale": usual if scale is None else scale},  # 0 is uniform attention
            "index_q_rope": turned, "index_k_rope": turned,
            "index_scale": {"by": (index_heads * index_dim) ** -0.5},
        }  # fmt: skip
        for node, numbers in (options.pop("settings", None) or {}).items():
            settings[node] = {**settings.get(node, {}), **numbers}
        found = composition or COMPOSITIONS["dsa_layer"]
        super().__init__(found, sizes, settings=settings, **options)


class GatedDeltaNet(LayerModule):
    """Gated DeltaNet from h_t to W_O: convolutions, gates, recurrence, gated norm."""

    def __init__(
        self, width: int, heads: int, value_heads: int | None = None, key_dim: int = 128,
        value_dim: int = 128, kernel: int = 4, **options: Any,
    ) -> None:  # fmt: skip
        """Sizes of the layer.

        Args:
            width: of the model.
            heads: heads of q and k.
            value_heads: heads of v, the gates and the state; as many if None.
            key_dim: of a key.
            value_dim: of a value.
            kernel: width of the convolutions.
            **options: as :class:`LayerModule`.

        Raises:
            SizeError: the value heads are no multiple of the others.
        """
        group = _group("gdn_layer", heads if value_heads is None else value_heads, heads)
        sizes = {"M": width, "Hk": heads, "G": group, "K": key_dim, "V": value_dim, "W": kernel}
        super().__init__(COMPOSITIONS["gdn_layer"], sizes, **options)
