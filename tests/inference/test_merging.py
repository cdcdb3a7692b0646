"""Which decoder a pass is computed with."""

from pathlib import Path

import pytest
import torch

from hone.inference.merging import Merging
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


def merged(merging: Merging, lora: Lora, decoder: Decoder) -> Decoder:
    """The copy, one layer of which is made before each pass."""
    for _ in decoder.layers[1:]:
        assert merging.decoder(1, [(0, 1, lora)]) == (decoder, [(0, 1, lora)])
    found, beside = merging.decoder(1, [(0, 1, lora)])
    assert found is not decoder and beside == ()
    return found


def test_an_adapter_is_merged_once_it_has_computed_enough_rows(decoder: Decoder):
    merging, lora = Merging(decoder, after=100), adapter(decoder, 1)
    for _ in range(9):  # 99 rows
        assert merging.decoder(11, [(0, 11, lora)]) == (decoder, [(0, 11, lora)])
    copy = merged(merging, lora, decoder)
    weight = decoder.layers[1].down.weight
    a, b = lora.factors("1.down")
    # alpha 16 over rank 4
    expected = weight + 4.0 * (b[0] @ a).t()
    torch.testing.assert_close(copy.layers[1].down.weight, expected, atol=1e-6, rtol=0)


def test_a_pass_in_which_others_take_part_is_computed_beside_the_weights(decoder: Decoder):
    merging, one, two = Merging(decoder, after=1), adapter(decoder, 1), adapter(decoder, 2)
    copy = merged(merging, one, decoder)
    for spans in ([(0, 4, one), (4, 9, two)], [(0, 4, one)], [(2, 9, one)], []):
        assert merging.decoder(9, spans) == (decoder, spans)
    assert merging.decoder(9, [(0, 9, one)]) == (copy, ())


def test_the_next_adapter_takes_the_place_of_the_one_before(decoder: Decoder):
    merging, one, two = Merging(decoder, after=1), adapter(decoder, 1), adapter(decoder, 2)
    first = merged(merging, one, decoder)
    second = merged(merging, two, decoder)
    a, b = first.layers[0].qkv.weight, second.layers[0].qkv.weight
    assert (a - b).abs().max() > 0.01
    merging.forget(one)  # not there any more
    assert merging.decoder(1, [(0, 1, two)]) == (second, ())
    merging.forget(two)
    assert merged(merging, two, decoder) is not second


def test_in_a_coarse_type_nothing_is_merged(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir, dtype=torch.bfloat16)
    merging, lora = Merging(decoder, after=1), adapter(decoder, 1)
    for _ in range(2 * len(decoder.layers)):
        assert merging.decoder(1, [(0, 1, lora)]) == (decoder, [(0, 1, lora)])
