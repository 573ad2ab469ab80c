"""A node's origin is the model's own line, not torch's."""

from pathlib import Path

import torch
from support.saved_programs import everything
from torch.fx import Graph

from mezzo.conversion.export import source_line, user_frame

TORCH = Path(torch.__file__).parent / "nn" / "linear.py"


def test_the_last_line_that_is_not_torch_s_is_the_origin():
    trace = (
        'File "/home/me/model.py", line 3, in forward\n    x = self.a(x)\n  File'
        f' "/home/me/layer.py", line 7, in forward\n    y\n  File "{TORCH}", line 134, in forward\n'
        "    z"
    )
    assert user_frame(trace)[0] == 'File "/home/me/layer.py", line 7, in forward'


def test_torch_s_line_stands_where_there_is_no_other():
    assert user_frame(f'File "{TORCH}", line 134, in forward')[2] == "134"


def test_code_that_torch_generated_is_no_origin():
    assert user_frame('File "<eval_with_key>.5", line 9, in forward') is None
    assert user_frame(None) is None


def test_nodes_tell_file_and_line():
    node = next(node for node in everything().graph.nodes if node.name == "embedding")
    name, line = source_line(node).split(":")
    assert name == "saved_programs.py"
    assert (
        "self.embed(ids)"
        in (Path(__file__).parents[1] / "support" / name).read_text().splitlines()[int(line) - 1]
    )
    assert source_line(Graph().placeholder("x")) == ""
