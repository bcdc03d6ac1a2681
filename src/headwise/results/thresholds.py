"""Where a share of attention begins to name a head: one table for the findings and the circuits.

The masses are means over the measured rows, shares of one; a head has the role when its mass is
above the threshold (strictly). The findings' other thresholds are in report/rules.toml, whose rows
of these names take theirs from here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

__all__ = ["LOCAL_FROM", "LOCAL_TOKENS", "THRESHOLDS"]

LOCAL_TOKENS: Final = 16  # "near" means closer than this
LOCAL_FROM: Final = 128  # tokens; in shorter texts everything is near

THRESHOLDS: Final = MappingProxyType(
    {
        "sinks": 0.3,  # Gu et al. 2024 (arXiv:2410.10781)
        "near_uniform": 0.95,  # ours
        "previous_token_heads": 0.4,  # ours
        "next_token_heads": 0.4,  # ours
        "induction_heads": 0.4,  # ours
        "duplicate_token_heads": 0.4,  # ours
        "local_heads": 0.8,  # ours
    }
)
