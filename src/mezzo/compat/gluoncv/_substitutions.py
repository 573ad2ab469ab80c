"""Names of gluoncv that this dialect lacks, and what to use instead."""

SUBSTITUTIONS = {
    "data": "torchvision.datasets and torch.utils.data.DataLoader",
    "nn": "torch.nn",
    "utils.viz": "torchvision.utils",
    "auto": "the autogluon package",
    "model_zoo.get_model_file": "get_model(name, pretrained=True, root=...)",
}
"""Dotted name → what to use."""
