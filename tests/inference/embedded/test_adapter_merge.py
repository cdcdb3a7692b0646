"""Which decoder computes a pass: the plain one, or the copy with a merged adapter."""

from pathlib import Path

import pytest
import torch

from hone.inference.embedded.adapter_merge import AdapterMerger
from hone.models.decoder import Decoder
from hone.models.lora import Lora


@pytest.fixture
def decoder(tiny_llama_dir: Path) -> Decoder:
    return Decoder.load(tiny_llama_dir)


def adapter(decoder: Decoder, seed: int) -> Lora:
    lora = Lora.init(decoder.config, rank=4, seed=seed)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return lora


def merged(merger: AdapterMerger, lora: Lora, decoder: Decoder) -> Decoder:
    """The copy, after one layer was merged before each pass."""
    for _ in decoder.layers[1:]:
        assert merger.decoder(1, [(0, 1, lora)]) == (decoder, [(0, 1, lora)])
    copy, rest = merger.decoder(1, [(0, 1, lora)])
    assert copy is not decoder and rest == ()
    return copy


def test_an_adapter_is_merged_once_it_has_computed_enough_rows(decoder: Decoder):
    merger, lora = AdapterMerger(decoder, after=100), adapter(decoder, 1)
    for _ in range(9):  # 99 rows
        assert merger.decoder(11, [(0, 11, lora)]) == (decoder, [(0, 11, lora)])
    copy = merged(merger, lora, decoder)
    weight = decoder.layers[1].down.weight
    a, b = lora.factors("1.down")
    # alpha 16 over rank 4
    expected = weight + 4.0 * (b[0] @ a).t()
    torch.testing.assert_close(copy.layers[1].down.weight, expected, atol=1e-6, rtol=0)


def test_a_pass_in_which_others_take_part_is_computed_beside_the_weights(decoder: Decoder):
    merger, one, two = AdapterMerger(decoder, after=1), adapter(decoder, 1), adapter(decoder, 2)
    copy = merged(merger, one, decoder)
    for spans in ([(0, 4, one), (4, 9, two)], [(0, 4, one)], [(2, 9, one)], []):
        assert merger.decoder(9, spans) == (decoder, spans)
    assert merger.decoder(9, [(0, 9, one)]) == (copy, ())


def test_the_next_adapter_takes_the_place_of_the_one_before(decoder: Decoder):
    merger, one, two = AdapterMerger(decoder, after=1), adapter(decoder, 1), adapter(decoder, 2)
    first = merged(merger, one, decoder)
    second = merged(merger, two, decoder)
    a, b = first.layers[0].qkv.weight, second.layers[0].qkv.weight
    assert (a - b).abs().max() > 0.01
    merger.forget(one)  # not there any more
    assert merger.decoder(1, [(0, 1, two)]) == (second, ())
    merger.forget(two)
    assert merged(merger, two, decoder) is not second


def test_in_a_coarse_type_nothing_is_merged(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir, dtype=torch.bfloat16)
    merger, lora = AdapterMerger(decoder, after=1), adapter(decoder, 1)
    for _ in range(2 * len(decoder.layers)):
        assert merger.decoder(1, [(0, 1, lora)]) == (decoder, [(0, 1, lora)])
