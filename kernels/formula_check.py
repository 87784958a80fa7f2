"""Checks that Triton can compile the formula of a scaling, on every backend alike and without Triton."""

import ast
import inspect
from collections.abc import Iterable
from functools import cache
from textwrap import dedent
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fused_lwlr.kernels import formula

CALLS = tuple(
    getattr(formula, name) for name in ("where", "minimum", "maximum", "maximum_or_nan", "sign", "single", "sqrt")
)  # fmt: skip
"""A formula may call these functions, and other formulas."""
LOGICAL_OPERATORS = (Tensor.__and__, Tensor.__or__, Tensor.__xor__, Tensor.__invert__)
SYNTAX = (
    ast.Expr, ast.Assign, ast.Return, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.BitAnd, ast.BitOr, ast.BitXor, ast.USub, ast.Invert, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt,
    ast.GtE, ast.Store, ast.Load,
)  # fmt: skip
"""Python that means the same to PyTorch and to Triton. Names, numbers, calls and comparisons are checked apart."""
NAMES_OF_SYNTAX: dict[type[ast.AST], str] = {
    ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.For: "for", ast.Pow: "**", ast.UAdd: "a sign +",
    ast.AugAssign: "an assignment such as +=, which changes a tensor in place",
    ast.BoolOp: "and or or", ast.Not: "not", ast.Compare: "a comparison of more than two values",
    ast.Attribute: "a name with a dot", ast.Lambda: "lambda", ast.Constant: "a constant that is no number",
}  # fmt: skip


@cache
def check_formula(function: Any, name: str) -> None:
    """Checks the formula of a scaling. `name` is its name in messages.

    Raises:
        ValueError: it is not a plain function with source in operators, numbers and names of `kernels.formula`, or does
            not return a tensor.
    """
    tree = _tree(function)
    if tree is None:
        raise ValueError(f"{name} must be a function that is defined by def in a file, not {function!r:.80}")
    try:
        problem = _problem(function, tree)
    except RecursionError:
        problem = "a call of itself"
    if problem is not None:
        raise ValueError(
            f"{name} cannot be compiled, since it has {problem}: write it with operators, numbers, and where, minimum, "
            "maximum and sqrt of fused_lwlr.kernels.formula"
        )
    one = torch.ones((), dtype=torch.float64, device="cpu")
    try:
        with _OnlyReal():
            result = function(*[one] * function.__code__.co_argcount)
    except Exception as error:
        raise ValueError(f"{name} fails when all of its arguments are 1: {error}") from error
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        raise ValueError(f"{name} must return a factor that depends on its arguments, not {result!r:.80}")


class _OnlyReal(TorchFunctionMode):
    """Refuses arithmetic on integers and on comparisons: Triton computes them in 32 bits and in one bit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # without conditions, which are no numbers
        numbers = () if func in LOGICAL_OPERATORS else args[1:] if func is torch.where else args
        if result.dtype != torch.bool:
            numbers = (*numbers, result)
        if any(isinstance(number, Tensor) and not number.is_floating_point() for number in numbers):
            raise ValueError("arithmetic with an integer or a comparison: write 1.0 for 1, and where(a > b, 1.0, 0.0)")
        return result


def _tree(function: Any) -> ast.FunctionDef | None:
    """Returns the syntax of a function, None for anything else."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) and tree.name == function.__name__ else None


def _problem(function: FunctionType, tree: ast.FunctionDef, numbers: frozenset[str] = frozenset()) -> str | None:
    """Returns the name of something in a formula that cannot be compiled, or None.

    `numbers` are the names of arguments that are numbers.
    """
    given, code = tree.args, function.__code__
    if given.posonlyargs or given.vararg or given.kwarg or given.kwonlyargs or given.defaults or not given.args:
        return "arguments other than one or more plain names"
    if any(not isinstance(each, ast.Name) or each.id != "staticmethod" for each in tree.decorator_list):
        return "a decorator"
    if code.co_freevars:
        return f"{code.co_freevars[0]!r}, a variable of a function around it"
    statements = tree.body if ast.get_docstring(tree) is None else tree.body[1:]
    return _first_problem(statements, function, numbers)


def _first_problem(nodes: Iterable[ast.AST], function: FunctionType, numbers: frozenset[str]) -> str | None:
    problems = (_problem_of(node, function, numbers) for node in nodes)
    return next(filter(None, problems), None)


def _problem_of(node: ast.AST, function: FunctionType, numbers: frozenset[str]) -> str | None:
    """Returns the name of something in a part of a formula that cannot be compiled, or None."""
    if isinstance(node, ast.Call):
        return _problem_of_call(node, function, numbers) or _first_problem(node.args, function, numbers)
    if isinstance(node, ast.Name):
        if node.id in function.__code__.co_varnames or isinstance(function.__globals__.get(node.id), (int, float)):
            return None
        return f"the name {node.id!r}, which is neither an argument nor a number"
    if isinstance(node, ast.Assign) and len(node.targets) > 1:
        return "an assignment to two names"
    if isinstance(node, (ast.Assign, ast.Return)) and not _has_tensor(node, function, numbers):
        # Triton makes a tensor of a number with a name: of 32 bits, so that a product may overflow
        return "a result without an argument" if isinstance(node, ast.Return) else "a number with a name"
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    is_comparison = isinstance(node, ast.Compare) and len(node.ops) == 1
    if not (is_number or is_comparison or isinstance(node, SYNTAX)):
        return NAMES_OF_SYNTAX.get(type(node), type(node).__name__)
    return _first_problem(ast.iter_child_nodes(node), function, numbers)


def _problem_of_call(node: ast.Call, function: FunctionType, numbers: frozenset[str]) -> str | None:
    """Returns why a function cannot be called, or None. The arguments are checked apart."""
    name = f"a call of {ast.unparse(node.func)!r}"
    called: Any = function.__globals__.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if node.keywords or not isinstance(called, FunctionType):
        return name
    if called in (formula.single, formula.sqrt) and not _has_tensor(node, function, numbers):
        # Triton calls a method of the argument
        return f"{name} with a number"
    if called in CALLS:
        return None
    if called.__module__ == formula.__name__:
        # for rules: their arguments have types that a scaling does not know
        return name
    tree = _tree(called)
    if tree is None:
        return f"{name}, which has no source"
    arguments = zip(called.__code__.co_varnames, node.args, strict=False)
    passed_numbers = frozenset(argument for argument, value in arguments if not _has_tensor(value, function, numbers))
    problem = _problem(called, tree, passed_numbers)
    return None if problem is None else f"{name}, which has {problem}"


def _has_tensor(node: ast.AST, function: FunctionType, numbers: frozenset[str]) -> bool:
    """Returns whether a value depends on an argument, or a variable, that is a tensor."""
    value = node.value if isinstance(node, ast.Assign) else node
    names = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)} - numbers
    return not names.isdisjoint(function.__code__.co_varnames)
