"""`paddle.jit`: compiled layers and functions."""

from __future__ import annotations

import pytest
import torch

from mezzo.compat import paddle


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = paddle.nn.Linear(4, 4)

    def forward(self, x, *, flat=False):
        y = paddle.nn.functional.relu(self.fc(x)).astype("float32")
        return y.reshape([0, -1]) if flat or y.shape == [2, 4] else y


def counting_backend(graph, inputs):
    counting_backend.calls += 1
    assert {type(one) for one in inputs} <= {torch.Tensor, torch.nn.Parameter, *PARAMETERS}
    return graph


PARAMETERS = (type(paddle.nn.Linear(1, 1).weight),)


def test_a_layer_runs_compiled_and_stays_itself():
    net, counting_backend.calls = Net(), 0
    x = paddle.rand([2, 4])
    expected = net(x)
    compiled = paddle.jit.to_static(net, backend=counting_backend)
    assert compiled is net
    result = compiled(x)
    assert counting_backend.calls == 1
    assert type(result) is paddle.Tensor
    assert torch.allclose(result, expected)
    result.sum().backward()
    assert net.fc.weight.grad.shape == [4, 4]
    assert set(net.state_dict()) == {"fc.weight", "fc.bias"}


def test_functions_are_compiled_by_a_decorator_with_and_without_arguments():
    counting_backend.calls = 0

    @paddle.jit.to_static(input_spec=[None], backend=counting_backend)
    def total(values, *, scale):
        return {"sum": values[0] + values[1]["x"] * scale}

    result = total([paddle.ones([2]), {"x": paddle.ones([2])}], scale=2.0)
    assert result["sum"].numpy().tolist() == [3.0, 3.0]
    assert counting_backend.calls == 1
    assert total.__name__ == "total"
    assert callable(paddle.jit.to_static(lambda x: x))


def test_a_compiler_that_fails_is_replaced_with_one_warning():
    def failing(graph, inputs):
        raise RuntimeError("no compiler on this machine")

    net = paddle.jit.to_static(Net(), backend=failing)
    with pytest.warns(UserWarning, match="runs .*Net.forward as it was written.*no compiler on"):
        first = net(paddle.ones([2, 4]))
    assert torch.equal(first, net(paddle.ones([2, 4])))


def test_errors_of_the_function_itself_are_raised():
    class ProgramError(Exception):
        __module__ = "__main__"

    @paddle.jit.to_static(backend="eager")
    def wrong(x):
        raise ProgramError("of the program")

    with pytest.raises(ProgramError, match="of the program"):
        wrong(paddle.ones([1]))


def test_not_to_static_and_the_switch_leave_functions_as_they_are():
    @paddle.jit.not_to_static
    def plain(x):
        return x.numpy()

    assert paddle.jit.to_static(plain) is plain
    assert paddle.jit.not_to_static()(lambda: 3)() == 3

    class Kept(Net):
        forward = paddle.jit.not_to_static(Net.forward)

    kept = Kept()
    assert paddle.jit.to_static(kept) is kept
    assert "forward" not in vars(kept)
    counting_backend.calls = 0
    paddle.jit.enable_to_static(False)
    try:
        paddle.jit.to_static(Net(), backend=counting_backend)(paddle.ones([2, 4]))
    finally:
        paddle.jit.enable_to_static(True)
    paddle.jit.ignore_module([torch])
    assert counting_backend.calls == 0


def test_auto_cast_around_a_compiled_layer_has_an_effect():
    net = paddle.jit.to_static(paddle.nn.Linear(4, 4), backend="eager")
    with paddle.amp.auto_cast(dtype="bfloat16"):
        assert net(paddle.ones([2, 4])).dtype is torch.bfloat16
    assert net(paddle.ones([2, 4])).dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: paddle.jit.to_static(3), TypeError, "takes a Layer or a function, but got int"),
        (lambda: paddle.jit.save(None, "p"), NotImplementedError, "torch.export.save"),
        (lambda: paddle.jit.load("p"), NotImplementedError, "torch.export.load"),
        (lambda: paddle.jit.TracedLayer, AttributeError, "jit has no TracedLayer"),
    ],
)
def test_what_is_not_supported_says_what_to_use(call, error, message):
    with pytest.raises(error, match=message):
        call()
