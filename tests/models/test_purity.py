"""A model file reads like the paper: calls of Ops on opaque arrays and nothing else (checked in its syntax tree)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ork.models

FOLDER = Path(ork.models.__file__).parent
FILES = sorted(f for f in FOLDER.glob("*.py") if f.name not in {"__init__.py", "config.py"})
MAX_LINES = 250
# What a forward pass may be: these methods run once a pass; everything else in these files runs once a model.
FORWARD = {"__call__", "forward", "begin", "layer", "end", "embed", "logits"}
MODULES = {"__future__", "dataclasses", "typing", "ork.errors", "ork.models", "ork.ops", "numpy", "numpy.typing"}


def forward_passes(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in FORWARD]


def faults(source: str) -> list[str]:
    """What in a model file is not a call of Ops, by line."""
    tree = ast.parse(source)
    out = []

    def fault(node: ast.AST, what: str) -> None:
        out.append(f"line {node.lineno}: {what}: {ast.unparse(node)[:80]}")  # type: ignore[attr-defined]

    annotations = {id(part) for node in ast.walk(tree) for slot in ("annotation", "returns")
                   if getattr(node, slot, None) is not None for part in ast.walk(getattr(node, slot))}  # fmt: skip
    numpy = {"np", "npt", "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                if not any(name == m or name.startswith(m + ".") for m in MODULES):
                    fault(node, "import")
        elif isinstance(node, ast.Name) and node.id in numpy and id(node) not in annotations:
            fault(node, "numpy outside of an annotation")
    for function in forward_passes(tree):
        if ast.get_docstring(function) and len(function.body) == 1:
            continue  # a protocol
        for node in ast.walk(function):
            if isinstance(node, (ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
                fault(node, "loop")
            elif isinstance(node, ast.For) and ast.unparse(node.iter) != "range(self.config.layers)":
                fault(node, "loop over something else than layers")
            elif isinstance(node, ast.Attribute) and node.attr in {"numpy", "cols", "tolist", "shape"}:
                fault(node, "a look into an array")
            elif (
                isinstance(node, ast.Attribute)
                and node.attr == "rows"
                and ast.unparse(node.value) not in {"self", "state"}
            ):
                fault(node, "a batch shape")
            elif isinstance(node, (ast.BinOp, ast.AugAssign)) and not constant(node):
                fault(node, "arithmetic")
            elif isinstance(node, ast.Subscript) and not (is_only_result(node) or is_block(node)):
                fault(node, "indexing")
    return out


def constant(node: ast.BinOp | ast.AugAssign) -> bool:
    """Arithmetic on the model's configuration, as sqrt(width)."""
    if not isinstance(node, ast.BinOp):
        return False
    return all(
        isinstance(side, ast.Constant) or ast.unparse(side).startswith(("self.config.", "c."))
        for side in (node.left, node.right)
    )


def is_only_result(node: ast.Subscript) -> bool:
    """linear(...)[0]: the one product of one weight."""
    call = node.value
    return (
        isinstance(call, ast.Call) and ast.unparse(call.func).endswith("ops.linear") and ast.unparse(node.slice) == "0"
    )


def is_block(node: ast.Subscript) -> bool:
    """self.blocks[i]: the layer that is asked for."""
    return ast.unparse(node) == "self.blocks[i]"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_only_ops(path: Path) -> None:
    source = path.read_text()
    assert faults(source) == []
    assert len(source.splitlines()) <= MAX_LINES


def test_one_file_an_architecture() -> None:
    stems = {f.stem for f in FILES}
    assert stems - {"layers", "moe"} == set(ork.models.ARCHITECTURES)
    assert any(forward_passes(ast.parse(f.read_text())) for f in FILES)


@pytest.mark.parametrize(
    "line",
    [
        "x = x.numpy()",
        "x = x * 2",
        "x += y",
        "for t in rows.tokens: x = ops.add(x, t)",
        "x = [ops.norm(r) for r in x]",
        "x = x[0]",
        "n = x.rows",
        "n = state.x.rows",
        "y = self.blocks[i][0]",
        "for block in self.blocks: x = block(x)",
        "n = x.cols",
        "x = np.tanh(x)",
        "import math",
        "while True: pass",
    ],
)
def test_the_check_notices(line: str) -> None:
    for name in ("forward", "layer"):
        assert faults(f"class M:\n    def {name}(self, x, y, rows):\n        {line}\n        return x\n")
