"""Every public name has a docstring with the sections that it needs, and a place on the site."""

import ast
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import fused_lwlr
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.options import SharedOptions
from fused_lwlr.scaling import Scaling

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text() for page in DOCS.glob("*.md")}
API = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
MODULES = {name: vars(fused_lwlr)[name] for name in fused_lwlr.__all__ if inspect.ismodule(getattr(fused_lwlr, name))}
TENSOR = re.compile(r"\b(Tensor|Array|ArrayLike)\b")
SHAPE = re.compile(r"\bshape|\[\w+[\w, .*]*\]|\bscalar|\bdtype|\bfloat(16|32|64)|\bnumber|\barray|\bmask")
"""Matches a statement of shape or dtype: a word for it, or dimensions such as [steps, layers]."""


def public():
    """Dotted name and object of every public name that is defined here."""
    found = {}
    for name in fused_lwlr.__all__:
        value = getattr(fused_lwlr, name)
        if inspect.ismodule(value):
            found |= {f"{name}.{each}": getattr(value, each) for each in value.__all__ if each != "Array"}
        else:
            found[name] = value
    found |= {"FusedOptimizer": FusedOptimizer, "Scaling": Scaling}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {f"{name}.{each}": getattr(value, each) for each in vars(value) if is_member(value, each)}
    return found


def is_member(cls, name):
    """Returns whether this is a public method or property, and not a field whose default is a function."""
    if name.startswith("_") or name == "formula":  # all formulas are described by `Scaling`
        return False
    function = inspect.unwrap(getattr(vars(cls)[name], "fget", None) or getattr(cls, name))
    return getattr(function, "__qualname__", "") == f"{cls.__qualname__}.{name}"


PUBLIC = public()


def function_of(value):
    """Returns the function whose errors count, and the names of the parameters."""
    if isinstance(value, property):
        return value.fget, []
    function = value
    if inspect.isclass(value):
        # the __init__ of a dataclass is generated
        names = ("__post_init__",) if is_dataclass(value) else ("__init__",)
        function = next((vars(value)[name] for name in names if name in vars(value)), None)
    if value is FusedOptimizer:  # the options of its subclasses
        return function, list(SharedOptions.__annotations__)
    parameters = [name for name in inspect.signature(value).parameters if name != "self"]
    return inspect.unwrap(function) if function else None, parameters


def source(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def raises(node):
    """Returns whether a line raises an error, or calls a function that only raises errors."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
    return (isinstance(node, ast.Raise) and node.exc is not None) or re.match(r"_?(check|require)", called or "")


def annotations(value, function):
    return " ".join(map(str, [*inspect.get_annotations(function or value).values()]))


def documented(docstring, sections=("Args", "Attributes")):
    """Names that the sections describe."""
    found = set()
    for section in sections:
        match = re.search(rf"^{section}:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
        for names in re.findall(r"^ {4}([\w*, ]+):", match[1] if match else "", re.MULTILINE):
            found |= {name.strip(" *") for name in names.split(",")}
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_the_required_sections(name):
    value = PUBLIC[name]
    docstring = inspect.getdoc(value)
    assert docstring, "no docstring"
    function, parameters = function_of(value)
    assert not set(parameters) - documented(docstring), "arguments that are not described"
    if function is not None:
        tree = source(function)
        if any(map(raises, ast.walk(tree))):
            assert "Raises:" in docstring, "it raises errors that are not described"
        if not inspect.isclass(value) and TENSOR.search(annotations(value, function)):
            assert SHAPE.search(docstring), "it takes or returns tensors of a shape or dtype that is not described"
    if is_dataclass(value) and not issubclass(value, Scaling):
        assert set(value.__dataclass_fields__) <= documented(docstring, ("Attributes",))


@pytest.mark.parametrize("name", [name for name in PUBLIC if "." not in name or name.split(".")[0] in MODULES])
def test_a_public_name_is_on_the_site(name):
    """With its docstring on a page of the API, and with an explanation on another page."""
    last = name.rpartition(".")[2]
    directives = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
    assert {last, name.partition(".")[0]} & {each.rpartition(".")[2] for each in directives}
    others = "\n".join(text for page, text in PAGES.items() if page != "api")
    assert name == "FusedOptimizer" or re.search(rf"\b{last}\b", others)
