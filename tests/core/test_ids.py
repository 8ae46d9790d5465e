"""Wire ids: unlike any other there ever was, and known again."""

from __future__ import annotations

import itertools
import threading

import pytest

from tszmq.core.ids import WireIds

pytestmark = pytest.mark.timeout(20)

NONCE = "00ff00ff00ff00ff"


def test_an_id_is_short_ascii_of_one_length():
    """28 characters are a msgpack fixstr, and none is a prefix of another."""
    ids = WireIds(NONCE)
    made = [ids.new() for _ in range(5000)]
    assert {len(each) for each in made} == {28}
    assert all(each.isascii() and each.startswith(NONCE) for each in made)
    assert len(set(made)) == len(made)


def test_later_ids_compare_greater():
    """Also where a digit is carried, and where the letters begin."""
    ids = WireIds(NONCE)
    made = [ids.new() for _ in range(5000)]
    assert made == sorted(made)


def test_two_clients_share_none():
    one, other = WireIds("0" * 16), WireIds("0" * 15 + "1")
    assert not {one.new() for _ in range(100)} & {other.new() for _ in range(100)}


def test_threads_get_different_ids():
    ids = WireIds(NONCE)
    start = threading.Barrier(8)
    made: list[list[str]] = [[] for _ in range(8)]

    def work(own: list[str]) -> None:
        start.wait(10)
        own.extend(ids.new() for _ in range(2000))

    threads = [threading.Thread(target=work, args=(own,)) for own in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(itertools.chain(*made))) == 16_000


def test_since_knows_our_own_from_a_point_on():
    ids = WireIds(NONCE)
    before, first, after = (ids.new() for _ in range(3))
    assert not ids.since(before, first)
    assert ids.since(first, first)
    assert ids.since(after, first)


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        NONCE,
        "f" * 16 + "f" * 12,
        NONCE + "f" * 11,
        NONCE + "f" * 13,
        "cmpl-123",
        NONCE[:-1] + "e" + "f" * 12,
        "é" * 28,
    ],
)
def test_since_knows_no_stranger(stranger):
    ids = WireIds(NONCE)
    assert not ids.since(stranger, ids.new())
