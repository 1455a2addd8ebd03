"""How many random declarations a property draws: its own number, or that of ``--examples``."""

from hypothesis import HealthCheck, settings

CHOSEN: list[int] = []


def examples(usual: int) -> settings:
    """Settings of a property: the same draws in every run, new ones with ``--examples N``."""
    return settings(
        max_examples=CHOSEN[0] if CHOSEN else usual,
        derandomize=not CHOSEN,
        print_blob=False,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
