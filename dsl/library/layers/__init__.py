"""Complete layers from h_t to W_O, composed of declared ops and named nodes."""

from attncc.dsl.composition import Composition
from attncc.dsl.layers import Layer
from attncc.dsl.library.layers.dsa import dsa_layer
from attncc.dsl.library.layers.gdn import gdn_layer
from attncc.dsl.library.layers.mha import mha_decode

COMPOSITIONS: dict[str, Composition] = {c.name: c for c in (mha_decode, dsa_layer, gdn_layer)}
LAYERS: dict[str, Layer] = {name: c.layer for name, c in COMPOSITIONS.items()}
"""The layers by name: what the ledger, the pictures and the sharding plan read."""
