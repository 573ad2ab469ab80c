"""Importing and using the dialects changes no name of torch, `install()` aside."""

import subprocess
import sys
import textwrap

SNAPSHOT = """
    import sys
    import warnings

    import torch
    import torch.cpu.amp
    import torch.cuda.amp
    import torch.distributed
    import torch.nn.functional
    import torch.optim.lr_scheduler
    import torch.utils.data

    # torch itself wraps torch.manual_seed and SGD.step at the first use of these.
    import torch._dynamo
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    PLACES = [
        torch, torch.Tensor, torch.nn, torch.nn.Module, torch.nn.Parameter, torch.nn.Linear,
        torch.nn.functional, torch.nn.init, torch.nn.parallel, torch.autograd, torch.cuda,
        torch.amp, torch.amp.autocast_mode, torch.amp.autocast, torch.amp.grad_scaler,
        torch.amp.GradScaler, torch.cuda.amp, torch.cpu.amp, torch.optim, torch.optim.Optimizer,
        torch.optim.SGD, torch.optim.lr_scheduler, torch.utils.data, torch.utils.data.DataLoader,
        torch.utils.data.Dataset, torch.distributed, torch.random, torch.linalg, torch.jit,
    ]

    def names():
        return [dict(vars(place)) for place in PLACES]

    def state():
        return {
            "default device": torch.get_default_device(),
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warnings": list(warnings.filters),
            "path": list(sys.path),
            "standard output": (sys.stdout, sys.excepthook, sys.displayhook),
        }

    def changed(before, after):
        for place, old, new in zip(PLACES, before, after):
            for name in old:
                if new.get(name) is not old[name] and name != "__doc__":
                    yield f"{place.__name__}.{name}"
            for name in new.keys() - old.keys():
                value = new[name]
                # Parts of torch that load when they are first used.
                module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
                if not module.startswith("torch"):
                    yield f"{place.__name__}.{name} is new"

    names_before, state_before, modules_before = names(), state(), set(sys.modules)
"""

IMPORTS = """
    import mezzo.compat
    import importlib
    import pkgutil

    dialects = [module.name for module in pkgutil.walk_packages(
        mezzo.compat.__path__, "mezzo.compat.")]
    for dialect in dialects:
        importlib.import_module(dialect)
"""

PROGRAMS = """
    x, target = torch.randn(8, 4), torch.randint(2, (8,))

    def network():
        return torch.nn.Linear(4, 2)

    def train_oneflow():
        import mezzo.compat.oneflow as flow

        class Training(flow.nn.Graph):
            def __init__(self):
                super().__init__()
                self.net, self.loss = network(), flow.nn.CrossEntropyLoss()
                self.add_optimizer(flow.optim.SGD(self.net.parameters(), lr=0.1))
                self.config.enable_amp(True)
                self.set_grad_scaler(flow.amp.GradScaler())

            def build(self, x, y):
                loss = self.loss(self.net(x), y)
                loss.backward()
                return loss

        str(Training()(x, target))

    def train_megengine():
        import mezzo.compat.megengine as mge
        import mezzo.compat.megengine.functional as F
        import mezzo.compat.megengine.module as M

        net = M.Sequential(M.Linear(4, 4), M.ReLU(), M.Linear(4, 2))
        gm = mge.autodiff.GradManager().attach(net.parameters())
        opt, scaler = mge.optimizer.SGD(net.parameters(), lr=0.1), mge.amp.GradScaler()
        with mge.amp.autocast(), gm:
            scaler.backward(gm, F.nn.cross_entropy(net(mge.tensor(x)), mge.tensor(target)))
        opt.step().clear_grad()

    def train_apex():
        from mezzo.compat.apex import amp

        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
        with amp.scale_loss(net(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        amp.initialize(network(), enabled=False)

    def train_paddle():
        from mezzo.compat import paddle

        net = network()
        optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=net.parameters())
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
        with paddle.amp.auto_cast(dtype="bfloat16"):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()

    def train_mxnet():
        from mezzo.compat.mxnet import amp, autograd, gluon

        amp.init()
        net = network()
        trainer = gluon.Trainer(net.parameters(), "sgd", {"learning_rate": 0.1})
        amp.init_trainer(trainer)
        with autograd.record(), amp.scale_loss(net(x).square().mean(), trainer) as scaled:
            autograd.backward(scaled)
        trainer.step(8)
        amp.uninit()

    def train_torch():
        from mezzo.compat import torch as dialect

        net, scaler = network(), dialect.GradScaler("cpu")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with dialect.autocast("cpu", dtype=torch.float16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

CHECK = """
    def check(what):
        assert not (found := sorted(changed(names_before, names()))), f"{what} changed {found}"
        differing = {name: value for name, value in state().items() if value != state_before[name]}
        assert not differing, f"{what} changed {differing}"
        foreign = {"apex", "megengine", "mxnet", "oneflow", "paddle", "gluoncv"}
        assert not foreign & (set(sys.modules) - modules_before), what
"""


def test_importing_and_using_the_dialects_changes_no_name_of_torch():
    program = "".join(
        map(textwrap.dedent, (SNAPSHOT, CHECK, IMPORTS, "check('an import')\n", PROGRAMS))
    ) + textwrap.dedent("""
        for name, train in [item for item in globals().items() if item[0].startswith("train_")]:
            train()
            check(name)
        """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
