"""Symbols and checkpoints in MXNet's formats, written without the code under test."""

import json
import struct

import numpy as np

FLAGS = {"float32": 0, "float64": 1, "float16": 2}


class SymbolWriter:
    """Collects the nodes of a symbol and the shapes of its parameters."""

    def __init__(self):
        self.nodes = []
        self.shapes = {}

    def variable(self, name, kind=None, shape=()):
        self.nodes.append({"op": "null", "name": name, "inputs": []})
        if kind:
            self.shapes[f"{kind}:{name}"] = shape
        return len(self.nodes) - 1

    def op(self, op, name, inputs, **attrs):
        entries = [[*one, 0] if isinstance(one, tuple) else [one, 0, 0] for one in inputs]
        node = {"op": op, "name": name, "inputs": entries}
        if attrs:
            node["attrs"] = {key: str(value) for key, value in attrs.items()}
        self.nodes.append(node)
        return len(self.nodes) - 1

    def conv(self, name, x, channels, filters, kernel, stride=1, pad=0, bias=False):
        inputs = [x, self.variable(f"{name}_weight", "arg", (filters, channels, kernel, kernel))]
        if bias:
            inputs.append(self.variable(f"{name}_bias", "arg", (filters,)))
        return self.op(
            "Convolution",
            name,
            inputs,
            kernel=(kernel, kernel),
            stride=(stride, stride),
            pad=(pad, pad),
            num_filter=filters,
            no_bias=not bias,
            workspace=256,
        )

    def norm(self, name, x, channels, **attrs):
        args = [self.variable(f"{name}_{part}", "arg", (channels,)) for part in ("gamma", "beta")]
        aux = [
            self.variable(f"{name}_moving_{part}", "aux", (channels,)) for part in ("mean", "var")
        ]
        return self.op("BatchNorm", name, [x, *args, *aux], **attrs)

    def fc(self, name, x, inputs, hidden):
        weight = self.variable(f"{name}_weight", "arg", (hidden, inputs))
        bias = self.variable(f"{name}_bias", "arg", (hidden,))
        return self.op("FullyConnected", name, [x, weight, bias], num_hidden=hidden)

    def json(self, *heads):
        """Return the symbol with these outputs, as MXNet writes it."""
        return {
            "nodes": self.nodes,
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node["op"] == "null"],
            "node_row_ptr": list(range(len(self.nodes) + 1)),
            "heads": [[*head, 0] if isinstance(head, tuple) else [head, 0, 0] for head in heads],
            "attrs": {"mxnet_version": ["int", 10500]},
        }

    def values(self, dtype="float32"):
        """Return random values for the parameters; variances are positive."""
        random = np.random.default_rng(0)
        return {
            name: (
                random.uniform(0.5, 2, shape)
                if name.endswith("var")
                else random.standard_normal(shape) * np.prod(shape[1:] or 1) ** -0.5
            ).astype(dtype)
            for name, shape in self.shapes.items()
        }

    def write(self, prefix, *heads):
        """Write both files of a checkpoint."""
        prefix.parent.mkdir(exist_ok=True)
        name = f"{prefix}-symbol.json"
        prefix.with_name(f"{prefix.name}-symbol.json").write_text(json.dumps(self.json(*heads)))
        prefix.with_name(f"{prefix.name}-0000.params").write_bytes(params_bytes(self.values()))
        return name


def params_bytes(values):
    """Return the bytes of a `.params` file: a header, V2 arrays on the CPU, and their names."""
    data = struct.pack("<QQQ", 0x112, 0, len(values))
    for value in values.values():
        data += struct.pack("<Iii", 0xF993FAC9, 0, value.ndim)
        data += struct.pack(f"<{value.ndim}q", *value.shape)
        data += struct.pack("<iii", 1, 0, FLAGS[str(value.dtype)]) + value.tobytes()
    data += struct.pack("<Q", len(values))
    return data + b"".join(struct.pack("<Q", len(name)) + name.encode() for name in values)


def resnet():
    """A small pre-activation ResNet: its symbol, its output and the shape of its data."""
    net = SymbolWriter()
    x = net.norm("bn_data", net.variable("data"), 3, fix_gamma=True, eps=2e-5)
    x = net.conv("conv0", x, 3, 4, 3, pad=1)
    for number, stride in enumerate((1, 2)):
        name = f"stage{number + 1}"
        first = net.norm(f"{name}_bn1", x, 4, fix_gamma=False)
        first = net.op("Activation", f"{name}_relu1", [first], act_type="relu")
        y = net.conv(f"{name}_conv1", first, 4, 4, 3, stride, 1)
        short = net.conv(f"{name}_sc", first, 4, 4, 1, stride)
        x = net.op("elemwise_add", f"_plus{number}", [y, short])
    x = net.op("Pooling", "pool1", [x], global_pool=True, kernel=(7, 7), pool_type="avg")
    x = net.fc("fc1", net.op("Flatten", "flatten0", [x]), 4, 10)
    return net, net.op("SoftmaxOutput", "softmax", [x, net.variable("softmax_label")]), (2, 3, 8, 8)


def vgg():
    """A small network in the style of AlexNet and VGG."""
    net = SymbolWriter()
    x = net.conv("conv1", net.variable("data"), 3, 6, 3, pad=1, bias=True)
    x = net.op("LRN", "norm1", [net.op("Activation", "relu1", [x], act_type="relu")], nsize=5)
    full = {"pool_type": "max", "pooling_convention": "full"}
    x = net.op("Pooling", "pool1", [x], kernel=(3, 3), stride=(2, 2), **full)
    x = net.fc("fc6", net.op("Flatten", "flatten", [x]), 6 * 4 * 4, 8)
    x = net.op("Dropout", "drop6", [net.op("LeakyReLU", "act6", [x], act_type="elu")], p=0.5)
    x = net.fc("fc7", x, 8, 3)
    return net, net.op("SoftmaxOutput", "prob", [x, net.variable("prob_label")]), (2, 3, 9, 9)


def inception():
    """A block of an Inception network with two outputs."""
    net = SymbolWriter()
    x = net.variable("data")
    one = net.conv("a", x, 3, 2, 1)
    two = net.conv("c", net.norm("b_bn", net.conv("b", x, 3, 2, 3, pad=1), 2), 2, 3, 3, pad=1)
    pooled = net.op("Pooling", "pool", [x], kernel=(3, 3), pad=(1, 1), pool_type="avg")
    joined = net.op("Concat", "mixed", [one, two, pooled], num_args=3, dim=1)
    half = net.op("SliceChannel", "halves", [joined], num_outputs=2, axis=1)
    return net, ((half, 0), (half, 1)), (1, 3, 5, 5)


def text_cnn():
    """A network over token ids, with an embedding."""
    net = SymbolWriter()
    weight = net.variable("embed_weight", "arg", (20, 6))
    x = net.op("Embedding", "embed", [net.variable("data"), weight], input_dim=20, output_dim=6)
    x = net.op("Reshape", "reshape", [x], shape=(0, 1, -1, 6))
    x = net.conv("conv", x, 1, 4, 3, pad=1, bias=True)
    x = net.op("max", "pooled", [net.op("tanh", "tanh", [x])], axis=(2, 3))
    x = net.fc("fc", x, 4, 1)
    return net, net.op("LogisticRegressionOutput", "out", [x, net.variable("out_label")]), (2, 7)


NETWORKS = {"resnet": resnet, "vgg": vgg, "inception": inception, "text_cnn": text_cnn}


def run_op(op, inputs, **attrs):
    """Run one op of the code under test on NumPy arrays; return NumPy arrays."""
    import torch

    from mezzo.compat.mxnet.symbol import load_json

    net = SymbolWriter()
    names = [f"x{number}" for number in range(len(inputs))]
    node = net.op(op, "node", [net.variable(name) for name in names], **attrs)
    symbol = load_json(json.dumps(net.json(node)))
    tensors = [torch.tensor(value) for value in inputs]
    result = symbol.model({}).run(dict(zip(names, tensors, strict=True)))
    return result[0].numpy()
