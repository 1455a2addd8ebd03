"""The library's declarations as ops: ``attncc.ops.attention(q, k, v)``."""

from attncc.dsl.library.attention import attention as _attention
from attncc.dsl.library.gated_delta_rule import gated_delta_rule as _gated_delta_rule
from attncc.runtime.api import Op

attention = Op(_attention)
gated_delta_rule = Op(_gated_delta_rule)

__all__ = ["attention", "gated_delta_rule"]
