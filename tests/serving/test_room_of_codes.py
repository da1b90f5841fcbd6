"""What is said of a cache whose codes are stored in more bits than they have is what it takes."""

from __future__ import annotations

import pytest

from skipless.quant.kvcache import PackedTensor
from skipless.serving import Settings, open_writer, write


@pytest.mark.parametrize("given", ["scheme", "kv_bits"])
def test_narrow_codes_take_the_room_that_is_told(given, tiny_run):
    def opened(bits: int):
        more = {"scheme": f"W8A8-KV{bits}"} if given == "scheme" else {"kv_bits": bits}
        writer = open_writer(str(tiny_run), **more)
        return writer.engine, write(writer, "the king", Settings(max_new_tokens=4)).cache_bytes

    size = {}
    for bits, stored in ((2, 4), (3, 4), (4, 4), (6, 8), (8, 8)):
        engine, size[bits] = opened(bits)
        assert (f"each stored in {stored} bits" in engine) == (bits != stored), engine
    assert size[2] == size[3] == size[4] < size[6] == size[8]


@pytest.mark.parametrize(
    ("bits", "symmetric", "stored"),
    [(2, True, 4), (4, True, 4), (4, False, 8), (5, True, 8), (8, True, 8), (8, False, 16),
     (9, True, 16), (16, True, 16), (16, False, 32)],
)  # fmt: skip
def test_bits_a_code_takes(bits, symmetric, stored):
    assert PackedTensor(bits, symmetric=symmetric).stored_bits == stored
