"""Hashes of tensors that add up over shards.

A tensor is seen as a sequence of 64-bit words. The hash is the sum, modulo 2^64, of each word times an odd random key and
of its upper half times another one. The keys depend on the position in the whole tensor, so the hashes of the shards of a
tensor add up to the hash of the whole tensor, without a gather. A change of one half of a word always changes the hash;
changes of several cancel with a probability of at most 2^-32.
The hash is of the bytes: 0.0 and -0.0 differ, and so do two NaN with different payloads.
"""

from __future__ import annotations

import threading
from typing import Optional

import torch

_MASK = (1 << 64) - 1
_CHUNK = 1 << 16  # words; in smaller chunks the calls take longer than the arithmetic
_NORMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mixed(value: int) -> int:
    """A bijection of 64-bit integers whose output looks random (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _word_key(index: int) -> int:
    """The odd key of a word within its chunk."""
    return _mixed(2 * index) | 1


def _upper_key(index: int) -> int:
    """The odd key of the upper half of a word. A product with the word loses its upper bits, the sign of an f32 first."""
    return _mixed(2 * index + 1) | 1


_keys: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _keys_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if device not in _keys:
        words, uppers = (
            torch.tensor([_signed(key(i)) for i in range(_CHUNK)], dtype=torch.int64).to(device)
            for key in (_word_key, _upper_key)
        )
        _keys[device] = (words, uppers)
    return _keys[device]


def _chunk_key(chunk: int) -> int:
    """The odd factor of the sum of a chunk, so that chunks can share the keys of words."""
    return _mixed(~chunk & _MASK) | 1


def elements_per_word(shape: tuple[int, ...], element_size: int) -> int:
    """How many elements form a word. A shard along the first dimension must not cut a word, and the number must follow
    from the shape of the whole tensor alone, so that all shardings agree."""
    row = 1
    for extent in shape[1:]:
        row *= extent
    count = max(1, 8 // element_size)
    while count > 1 and row % count:
        count //= 2
    return count


def _as_words(tensor: torch.Tensor, per_word: int) -> torch.Tensor:
    """The bytes of a flat contiguous tensor as int64 words, each of `per_word` elements."""
    size = tensor.element_size()
    if size > 8:  # complex128
        tensor, size, per_word = torch.view_as_real(tensor).reshape(-1), size // 2, 1
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    width = size * per_word
    if width not in _INTEGERS:
        raise TypeError(f"hash: elements of {size} bytes are not supported")
    if per_word > 1 and tensor.storage_offset() % per_word:
        tensor = tensor.clone()  # a view as wider integers needs an aligned start
    integers = tensor.view(_INTEGERS[width])
    return integers if width == 8 else integers.to(torch.int64)


class _Buffers(threading.local):
    """A chunk of words for the intermediate results of a thread. Allocating it anew costs page faults."""

    def __init__(self) -> None:
        self.chunks: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self.chunks:
            self.chunks[device] = torch.empty(_CHUNK, dtype=torch.int64, device=device)
        return self.chunks[device]


_buffers = _Buffers()


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a, b) if a.is_cpu else (a * b).sum()  # other devices have no dot of integers


@torch.no_grad()
def hash_elements(tensor: torch.Tensor, offset: int = 0, per_word: int = 1) -> int:
    """The hash of a part of a tensor that begins at the element `offset` of the whole, in [0, 2^64).

    `offset` and the number of elements are multiples of `per_word`.
    """
    count = tensor.numel()
    if count == 0:
        return 0
    flat = tensor.detach().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if not flat.is_contiguous():
        flat = flat.contiguous()
    words = _as_words(flat, per_word)
    total_words = words.numel()
    position = offset // per_word * (total_words * per_word // count)
    if total_words == 1:  # as below, in fewer calls: optimizers keep their step in a tensor
        chunk, within = divmod(position, _CHUNK)
        word = int(words.item())
        product = word * _word_key(within) + (word >> 32) * _upper_key(within)
        return product * _chunk_key(chunk) & _MASK
    keys, upper_keys = _keys_on(words.device)
    buffer = _buffers.on(words.device)
    sums: list[torch.Tensor] = []
    chunks: list[int] = []
    begin = 0
    while begin < total_words:
        chunk, within = divmod(position + begin, _CHUNK)
        length = min(_CHUNK - within, total_words - begin)
        upper = buffer[:length]
        part = words[begin : begin + length]
        torch.bitwise_right_shift(part, 32, out=upper)
        lower = _dot(part, keys[within : within + length])
        sums.append(lower + _dot(upper, upper_keys[within : within + length]))
        chunks.append(chunk)
        begin += length
    parts = [sums[0].item()] if len(sums) == 1 else torch.stack(sums).tolist()
    return sum(part * _chunk_key(chunk) for part, chunk in zip(parts, chunks)) & _MASK


def hash_flat(tensor: torch.Tensor) -> int:
    """The hash of a whole tensor, as of its elements in order, whatever its shape. Used for buffers of collectives."""
    count = max(1, 8 // tensor.element_size())
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() - flat.numel() % count
    total = hash_elements(flat[:whole], 0, count)
    if whole < flat.numel():
        # The last elements do not fill a word. They get positions that no word of the same tensor has.
        total += hash_elements(flat[whole:], flat.numel() * count + whole, 1)
    return total & _MASK


@torch.no_grad()
def square_sum(tensor: torch.Tensor) -> Optional[float]:
    """The sum of squares in f64 if the tensor holds floating-point numbers, else None. It adds up over shards."""
    if tensor.dtype not in _NORMED:
        return None
    norm = float(torch.linalg.vector_norm(tensor.detach().reshape(-1), dtype=torch.float64))
    return norm * norm


def text(value: int) -> str:
    """A hash as it stands in a record."""
    return f"{value:016x}"
