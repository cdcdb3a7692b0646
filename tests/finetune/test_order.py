"""Which examples an epoch visits."""

from itertools import chain

from hone.finetune.resume import epoch_of, rounds_of

EXAMPLES = list("abcdefg")


def test_an_epoch_is_every_example_once_in_an_order_of_its_own():
    first, second = (epoch_of(EXAMPLES, seed=1, epoch=e) for e in (0, 1))
    assert sorted(first) == sorted(second) == EXAMPLES
    assert first != second
    assert first == epoch_of(EXAMPLES, seed=1, epoch=0)
    assert first != epoch_of(EXAMPLES, seed=2, epoch=0)


def test_an_example_comes_again_only_when_all_were_seen():
    # 7 examples, 3 an epoch: the first 7 draws are epochs 0 and 1 and one of epoch 2.
    epochs = [epoch_of(EXAMPLES, seed=0, epoch=e, size=3) for e in range(14)]
    assert all(len(set(epoch)) == 3 for epoch in epochs)
    drawn = list(chain(*epochs))
    assert sorted(drawn[:7]) == EXAMPLES
    # 14 epochs of 3 are 42 draws, six times each of the seven.
    assert {drawn.count(example) for example in EXAMPLES} == {6}
    assert all(drawn.index(e) < 7 for e in EXAMPLES)


def test_more_than_there_are_is_all():
    assert sorted(epoch_of(EXAMPLES, seed=0, epoch=3, size=99)) == EXAMPLES


def test_rounds_cut_an_epoch_in_order():
    assert rounds_of(EXAMPLES, 3) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert rounds_of(EXAMPLES, None) == [EXAMPLES]
    assert rounds_of([], None) == []
