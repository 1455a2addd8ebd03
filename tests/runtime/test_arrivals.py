"""Counters of split tiles: zero, aligned, large enough, and nobody else's."""

import threading

import torch

from attncc.runtime.arrivals import ALIGNED, FEWEST, Reserve, arrivals, forget, zeroed

CPU = torch.device("cpu")


def test_a_stream_keeps_its_counters_until_it_needs_more() -> None:
    small, again = zeroed(3, CPU), zeroed(FEWEST, CPU)
    assert small.data_ptr() == again.data_ptr() and small.numel() == FEWEST
    more = zeroed(FEWEST + 1, CPU)
    assert more.numel() > FEWEST and not more.any()
    assert arrivals(1, CPU).data_ptr() == more.data_ptr()
    assert more.dtype == torch.int32 and more.data_ptr() % 16 == 0


def test_counters_that_a_launch_left_are_forgotten() -> None:
    zeroed(1, CPU)[0] = 1
    forget()
    assert not zeroed(1, CPU).any()


def test_two_threads_do_not_share_counters() -> None:
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(zeroed(1, CPU).data_ptr()))
    other.start()
    other.join()
    assert found != [zeroed(1, CPU).data_ptr()]


def test_what_a_reserve_gives_is_never_given_again() -> None:
    reserve = Reserve(torch.zeros(4 * ALIGNED, dtype=torch.int32))
    first, second = reserve.take(ALIGNED), reserve.take(2 * ALIGNED)
    assert first is not None and second is not None
    first += 1
    assert not second.any() and reserve.left == ALIGNED
    assert reserve.take(2 * ALIGNED) is None
    assert reserve.take(ALIGNED) is not None
