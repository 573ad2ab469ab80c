"""Programs of OneFlow's guide to automatic mixed precision, with fewer and smaller batches."""

import pytest

import mezzo.compat.oneflow as flow
from mezzo.compat.oneflow import nn

DEVICE = "cuda" if flow.cuda.is_available() else "cpu"


class Setup:
    """The model, the loss and the optimizer of the first block."""

    def __init__(self):
        flow.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).to(DEVICE)
        self.model.train()
        self.loss_fn = nn.CrossEntropyLoss().to(DEVICE)
        self.optimizer = flow.optim.SGD(self.model.parameters(), lr=1e-3)


@pytest.fixture
def setup():
    return Setup()


def batch():
    return flow.randn(16, 32).to(DEVICE), flow.ones(16, 1, dtype=flow.int64).to(DEVICE)


def graph_class(setup, scaler=None):
    class CustomGraph(flow.nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = setup.model
            self.loss_fn = setup.loss_fn
            self.add_optimizer(setup.optimizer)
            self.config.enable_amp(True)
            self.output_dtypes = []
            if scaler is not None:
                self.set_grad_scaler(scaler)

        def build(self, x, y):
            predicted = self.model(x)
            self.output_dtypes.append(predicted.dtype)
            loss = self.loss_fn(predicted, y)
            loss.backward()
            return predicted

    return CustomGraph


def test_model_loss_and_optimizer_are_constructed_as_in_torch(setup):
    x, y = batch()
    assert setup.loss_fn(setup.model(x), y).shape == ()
    assert setup.model.training


def test_one_line_in_the_graph_enables_amp(setup):
    graph = graph_class(setup)()
    assert graph.training
    graph(*batch())
    assert graph.output_dtypes == [flow.float16]


def test_training_with_amp_lowers_the_loss_and_keeps_float32_parameters(setup):
    graph = graph_class(setup)()
    x, y = batch()
    before = setup.loss_fn(setup.model(x), y).item()
    for _ in range(100):
        predicted = graph(*batch())
    assert (predicted.shape, predicted.dtype) == ((16, 10), flow.float32)
    assert setup.loss_fn(setup.model(x), y).item() < 0.95 * before
    assert all(parameter.dtype is flow.float32 for parameter in setup.model.parameters())


def guide_scaler():
    return flow.amp.GradScaler(
        init_scale=2**12,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
    )


def test_the_loss_scale_grows_after_the_growth_interval(setup):
    graph = graph_class(setup, guide_scaler())()
    for _ in range(1000):
        graph(*batch())
    assert graph.mezzo_step.scale == 2**13


def test_a_non_finite_step_is_skipped_and_the_loss_scale_backs_off(setup):
    graph = graph_class(setup, guide_scaler())()
    graph(*batch())
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    x, y = batch()
    x[0, 0] = float("inf")
    graph(x, y)
    assert (graph.mezzo_step.skipped, graph.mezzo_step.scale) == (True, 2**11)
    assert all(
        flow.equal(new, old) for new, old in zip(setup.model.parameters(), before, strict=True)
    )
    graph(*batch())
    assert not graph.mezzo_step.skipped
    assert not flow.equal(setup.model[0].weight, before[0])
