"""The code of documents in the folder that MEZZO_DOCUMENTS names, and the tool that runs it."""

import json
import os
from pathlib import Path

import pytest
from support import documents as tool

FOLDER = os.environ.get(tool.VARIABLE)
REASON = f"{tool.VARIABLE} names no folder with documents"


@pytest.mark.skipif(not FOLDER, reason=REASON)
@pytest.mark.parametrize(
    "path", tool.documents(Path(FOLDER)) if FOLDER else [], ids=lambda path: path.name
)
def test_the_code_of_a_document_runs(path):
    verdict = tool.run_document(path)
    assert verdict.runs, verdict.why


GUIDE = """
# A guide

```python
import oneflow as flow
x = flow.ones(100)
```

Some output:

```text
tensor(100.)
```

1. A step, indented:

   ```py
   print(int(x.sum()))
   ```
"""

PAGE = """
Title
=====

.. code-block:: python
    :linenos:

    import megengine.functional as F
    from megengine import amp

    with amp.autocast():
        value = F.relu

.. code-block:: bash

    exit 1

.. code-block::

    raise KeyError("the sixteenth line is here")

The end.
"""


def test_blocks_of_python_are_found_with_their_lines():
    blocks = tool.code_blocks(GUIDE)
    assert [[line.text for line in block] for block in blocks] == [
        ["import oneflow as flow", "x = flow.ones(100)"],
        ["print(int(x.sum()))"],
    ]
    assert [block[0].number for block in blocks] == [5, 18]
    first, second = tool.code_blocks(PAGE)
    assert [line.text for line in first if line.text][-1] == "    value = F.relu"
    assert second[1].text.startswith("raise KeyError")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("import paddle", "from mezzo.compat import paddle"),
        ("import oneflow as flow", "import mezzo.compat.oneflow as flow"),
        ("import paddle.nn as nn  # layers", "import mezzo.compat.paddle.nn as nn  # layers"),
        ("import mxnet.gluon", "import mezzo.compat.mxnet.gluon; from mezzo.compat import mxnet"),
        ("    from apex import amp", "    from mezzo.compat.apex import amp"),
        ("from mxnet.contrib import amp", "from mezzo.compat.mxnet.contrib import amp"),
        ("import paddlenlp", "import paddlenlp"),
        ("import torch", "import torch"),
    ],
)
def test_import_lines_of_other_systems_become_those_of_the_dialects(line, changed):
    assert tool.change_import(line) == changed


def test_substitutions_change_lines_and_insert_lines(tmp_path):
    table = {"*": [["ones", "zeros"]], "guide.md": [["100", "2"], [r"\A", "import math"]]}
    (tmp_path / "substitutions.json").write_text(json.dumps(table))
    program, blocks = tool.make_program(GUIDE, tool.read_substitutions(tmp_path, "guide.md"))
    assert blocks == 2
    assert [line.text for line in program][:3] == [
        "import math",
        "import mezzo.compat.oneflow as flow",
        "x = flow.zeros(2)",
    ]
    with pytest.raises(ValueError, match="'1000' matches no line"):
        tool.make_program(GUIDE, [["1000", "2"]])


def test_documents_are_run_and_listed_with_the_line_that_fails(tmp_path, capsys):
    # Without mezzo's imports, which take seconds.
    (tmp_path / "good.md").write_text("```python\nx = 1\n```\ntext\n```\nprint(x)\n```\n")
    (tmp_path / "page.rst").write_text(PAGE)
    (tmp_path / "prose.txt").write_text("No code at all.\n")
    (tmp_path / "substitutions.json").write_text(
        json.dumps({"page.rst": [[r".*megengine.*", ""], [r"^(with|    value).*", ""]]})
    )
    assert tool.main([str(tmp_path)]) == 1
    good, page, prose, total = capsys.readouterr().out.splitlines()
    assert good.split() == ["good.md", "2", "blocks", "runs"]
    assert "fails: line 20: KeyError: 'the sixteenth line is here'" in page
    assert "it has no block of Python" in prose
    assert total == "1 of 3 documents run"
