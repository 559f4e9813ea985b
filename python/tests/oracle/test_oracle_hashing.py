"""Hashes of tensors and of their shards."""

import random

import pytest
import torch

from tessera.oracle import hashing
from tessera.oracle.hashing import elements_per_word, hash_elements, hash_flat, square_sum

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool]


def sample(shape, dtype):
    torch.manual_seed(3)
    return (torch.randn(shape) * 50).to(dtype)


def whole_hash(tensor):
    return hash_elements(tensor, 0, elements_per_word(tuple(tensor.shape), tensor.element_size()))


def reference(words):
    """The definition, without chunks of tensors: words are unsigned integers."""
    total = 0
    for position, word in enumerate(words):
        chunk, within = divmod(position, hashing._CHUNK)
        signed = word - (1 << 64) if word >> 63 else word
        mixed = signed * hashing._word_key(within) + (signed >> 32) * hashing._upper_key(within)
        total += mixed * hashing._chunk_key(chunk)
    return total & MASK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 6), (9, 5), (13,), (5, 3, 4), (1, 1)])
def test_shards_add_up_to_the_whole(dtype, shape):
    tensor = sample(shape, dtype)
    row = tensor[0].numel()
    per_word = elements_per_word(shape, tensor.element_size())
    for cuts in ([0, shape[0]], [0, 1, shape[0]], [0, shape[0] // 2, shape[0], shape[0]]):
        total = sum(hash_elements(tensor[a:b].clone(), a * row, per_word) for a, b in zip(cuts, cuts[1:]))
        assert total & MASK == whole_hash(tensor)


def test_shards_add_up_over_chunks():
    tensor = sample((1000, 333), torch.float32)
    per_word = elements_per_word((1000, 333), 4)
    assert tensor.numel() // per_word > 2 * hashing._CHUNK
    parts = [(0, 1), (1, 400), (400, 977), (977, 1000)]
    assert sum(hash_elements(tensor[a:b], a * 333, per_word) for a, b in parts) & MASK == whole_hash(tensor)


def test_is_as_defined():
    words = [random.Random(1).getrandbits(64) for _ in range(hashing._CHUNK + 10)]
    tensor = torch.tensor([w - (1 << 64) if w >> 63 else w for w in words])
    assert hash_elements(tensor) == reference(words)
    for position in (0, 5, hashing._CHUNK + 3):  # one word takes another path
        assert hash_elements(tensor[position : position + 1], position) == reference([0] * position + [words[position]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_bit_and_each_position_counts(dtype):
    tensor = sample((64, 8), dtype)
    integers = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
    seen = {whole_hash(tensor), hash_flat(tensor.flatten()[:-1])}
    bits = tensor.element_size() * 8
    for index in range(0, tensor.numel(), 5):
        for bit in range(bits):
            changed = integers.clone()
            mask = 1 << bit
            changed.view(-1)[index] ^= mask - (1 << bits) if bit == bits - 1 else mask
            seen.add(whole_hash(changed.view(dtype)))
    assert len(seen) == 2 + len(range(0, tensor.numel(), 5)) * bits


def test_pairs_of_changed_signs_differ():
    """Signs are the highest bits, where sums modulo 2^64 lose most."""
    tensor = sample((100, 2), torch.float32)
    seen = set()
    for i in range(0, 200, 3):
        for j in range(i + 1, 200, 7):
            changed = tensor.clone()
            changed.view(-1)[[i, j]] *= -1
            seen.add(whole_hash(changed))
    assert len(seen) == sum(len(range(i + 1, 200, 7)) for i in range(0, 200, 3))


def test_permutations_differ():
    tensor = sample((40, 8), torch.float32)
    swapped = tensor.clone()
    swapped[[3, 20]] = tensor[[20, 3]]
    assert whole_hash(swapped) != whole_hash(tensor)
    columns = tensor[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert whole_hash(columns) != whole_hash(tensor)


def test_is_of_the_bytes():
    assert whole_hash(torch.tensor([[0.0, 0.0]])) != whole_hash(torch.tensor([[-0.0, 0.0]]))
    nan = torch.tensor([[float("nan"), 1.0]])
    assert whole_hash(nan) == whole_hash(nan.clone())


def test_views_hash_as_copies():
    tensor = sample((10, 8), torch.float32)
    assert whole_hash(tensor.t()) == whole_hash(tensor.t().contiguous())
    flat = tensor.view(-1)
    for offset in range(3):  # a view as wider integers needs an aligned start
        view = flat[offset : offset + 8]
        assert hash_flat(view) == hash_flat(view.clone())
        assert hash_flat(view) != hash_flat(flat[offset + 1 : offset + 9])
    assert hash_flat(torch.zeros(0)) == 0
    assert whole_hash(torch.tensor(2.0)) == whole_hash(torch.tensor(2.0).clone()) != whole_hash(torch.tensor(3.0))


def test_square_sum():
    assert square_sum(torch.tensor([3.0, 4.0])) == 25.0
    assert square_sum(torch.zeros(0)) == 0.0
    assert square_sum(torch.tensor([1, 2])) is None
