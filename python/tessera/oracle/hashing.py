"""Hashes of tensors that add up over shards.

A tensor is seen as a sequence of 64-bit words. The hash is the sum, modulo 2^64, of a mix of each word with its position
in the whole tensor. So the hashes of the shards of a tensor add up to the hash of the whole tensor, without a gather.
The hash is of the bytes: 0.0 and -0.0 differ, and so do two NaN with different payloads.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_CHUNK = 1 << 15  # words; larger chunks gain little, and their buffers leave the second cache of a core
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


_keys: dict[torch.device, torch.Tensor] = {}


def _keys_on(device: torch.device) -> torch.Tensor:
    """An odd random key for each word of a chunk. Multiplication by an odd key is a bijection."""
    keys = _keys.get(device)
    if keys is None:
        keys = torch.tensor([_signed(_mixed(i) | 1) for i in range(_CHUNK)], dtype=torch.int64).to(device)
        _keys[device] = keys
    return keys


def _chunk_key(chunk: int) -> int:
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


@torch.no_grad()
def hash_elements(tensor: torch.Tensor, offset: int = 0, per_word: int = 1) -> int:
    """The hash of a part of a tensor that begins at the element `offset` of the whole, in [0, 2^64).

    `offset` and the number of elements are multiples of `per_word`.
    """
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if not flat.is_contiguous():
        flat = flat.contiguous()
    words = _as_words(flat, per_word)
    position = offset // per_word * (words.numel() * per_word // flat.numel())
    keys = _keys_on(words.device)
    buffer = torch.empty(min(_CHUNK, words.numel()), dtype=torch.int64, device=words.device)
    shifted = torch.empty_like(buffer)
    sums: list[torch.Tensor] = []
    chunks: list[int] = []
    begin = 0
    while begin < words.numel():
        chunk, within = divmod(position + begin, _CHUNK)
        count = min(_CHUNK - within, words.numel() - begin)
        mixed, high = buffer[:count], shifted[:count]
        torch.mul(words[begin : begin + count], keys[within : within + count], out=mixed)
        # A difference in the upper bits of a word stays in the upper bits of a product; the shift spreads it.
        torch.bitwise_right_shift(mixed, 32, out=high)
        mixed.bitwise_xor_(high)
        sums.append(mixed.sum())
        chunks.append(chunk)
        begin += count
    total = 0
    for chunk, part in zip(chunks, torch.stack(sums).tolist()):
        total += part * _chunk_key(chunk)
    return total & _MASK


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
def square_sum(tensor: torch.Tensor) -> float | None:
    """The sum of squares in f64 if the tensor holds floating-point numbers, else None. It adds up over shards."""
    if tensor.dtype not in _NORMED:
        return None
    norm = float(torch.linalg.vector_norm(tensor.detach().reshape(-1), dtype=torch.float64))
    return norm * norm


def text(value: int) -> str:
    """A hash as it stands in a record."""
    return f"{value:016x}"
