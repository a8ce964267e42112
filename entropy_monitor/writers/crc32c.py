"""CRC-32C by numpy: the checksum of event files, forty times faster than TensorBoard's loop.

TensorBoard computes it byte by byte in Python: 0.3 s, GIL held, for one step of 100 layers x 128
heads. The checksum is linear over GF(2), so the data is cut into equal lanes, all lanes advance
together through lookup tables, and are then joined in order by "append so many zero bytes", a
32 x 32 bit matrix.

Source of the method: the `crc32_combine` of zlib (M. Adler), with the Castagnoli polynomial.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Matrix = tuple[int, ...]
"""What becomes of each single bit of a register, bit 0 first."""

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_LANES = 2048


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    # Zero bytes in front leave an all-zero register as it is, so padding there costs nothing but
    # the start value, which is carried over the true length on its own.
    lane_words = -(-len(data) // (4 * _LANES)) or 1
    padded = np.zeros(4 * _LANES * lane_words, dtype=np.uint8)
    padded[len(padded) - len(data) :] = np.frombuffer(data, dtype=np.uint8)
    lanes = _advance(np.ascontiguousarray(padded.view("<u4").reshape(_LANES, lane_words).T))
    tables = _byte_tables(4 * lane_words)
    register = 0
    for lane in lanes.tolist():
        register = (
            tables[0][register & 255]
            ^ tables[1][register >> 8 & 255]
            ^ tables[2][register >> 16 & 255]
            ^ tables[3][register >> 24]
            ^ lane
        )
    return register ^ _times(_zero_bytes(len(data)), 0xFFFFFFFF) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the checksum in the form event files store it: rotated, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _advance(words: Words) -> Words:
    """Take every lane (column) through its words; all registers start at 0."""
    low, high = _word_tables()
    state = np.zeros(words.shape[1], dtype="<u4")
    halves = state.view("<u2")
    first, second = np.empty_like(state), np.empty_like(state)
    for word in words:
        np.bitwise_xor(state, word, out=state)
        np.take(low, halves[0::2], out=first, mode="clip")
        np.take(high, halves[1::2], out=second, mode="clip")
        np.bitwise_xor(first, second, out=state)
    return state


@lru_cache(maxsize=1)
def _word_tables() -> tuple[Words, Words]:
    """What the lower and the upper half of a register become after four zero bytes."""
    matrix = _zero_bytes(4)
    half = np.arange(1 << 16, dtype=np.uint32)
    return _apply(matrix, half), _apply(matrix, half << np.uint32(16))


@lru_cache(maxsize=16)
def _byte_tables(count: int) -> tuple[list[int], ...]:
    """What each byte of a register becomes after `count` zero bytes."""
    byte = np.arange(256, dtype=np.uint32)
    return tuple(
        _apply(_zero_bytes(count), byte << np.uint32(shift)).tolist() for shift in (0, 8, 16, 24)
    )


@lru_cache(maxsize=128)
def _zero_bytes(count: int) -> Matrix:
    """Return what appending `count` zero bytes does to a register."""
    if count == 0:
        return tuple(1 << bit for bit in range(32))
    if count == 1:
        return tuple(_zero_byte(1 << bit) for bit in range(32))
    half = _zero_bytes(count // 2)
    twice = tuple(_times(half, column) for column in half)
    return tuple(map(_zero_byte, twice)) if count % 2 else twice


def _zero_byte(register: int) -> int:
    for _ in range(8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _times(matrix: Matrix, register: int) -> int:
    result = 0
    for column in matrix:
        if register & 1:
            result ^= column
        register >>= 1
    return result


def _apply(matrix: Matrix, registers: Words) -> Words:
    """Multiply a bit matrix with each register."""
    result = np.zeros_like(registers)
    for bit, column in enumerate(matrix):
        result ^= ((registers >> np.uint32(bit)) & np.uint32(1)) * np.uint32(column)
    return result
