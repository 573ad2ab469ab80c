import torch

from mezzo.compat.oneflow.nn import CrossEntropyLoss


def test_the_words_of_the_constructor_arrive():
    logits, weight = torch.randn(4, 3), torch.tensor([1.0, 2.0, 3.0])
    target = torch.tensor([0, 1, 2, 0])
    words = {"weight": weight, "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    expected = torch.nn.CrossEntropyLoss(**words)(logits, target)
    assert torch.equal(CrossEntropyLoss(**words)(logits, target[:, None]), expected)
