"""A Jinja environment whose every operation is paid for: the bounds that Jinja's own sandbox does not have.

Jinja's immutable sandbox stops escapes.  It does not stop nested loops, ``'a' * n``, padding, doubling or
constants that grow while a template is compiled.  Here nothing is evaluated at compile time, and each loop
turn, call, operator, filter and printed value is paid for: a `Meter` stops the render by size, work and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from gtp_serve.loaders.chat_guards import FILTERS, METHOD_GUARDS, OPERATOR_CHECKS
from gtp_serve.loaders.chat_meter import ITEM_COST, Meter, meter_of, size

_ITERATE = "iterate within bounds"
_CONCATENATE = "concatenate within bounds"
_WALK = "walk within bounds"
_COPY = "copy within bounds"
#: Tests that Jinja compiles on the name or the kind of a value alone.
_STATIC_TESTS = {
    "defined",
    "undefined",
    "none",
    "string",
    "number",
    "mapping",
    "sequence",
    "iterable",
    "true",
    "false",
}


class GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's part for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements up to ``{% endgeneration %}`` as a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Sends what Jinja leaves to Python (loops, ``~``, comparisons, keys) through filters that pay for it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = sum(_static_cost(part) for part in node.body)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ITERATE, nodes.Const(cost))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _WALK)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _WALK)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.name not in _STATIC_TESTS:
            node.node = _filtered(node.node, _WALK)
            node.args = [_filtered(arg, _WALK) for arg in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _COPY)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _filtered(node.key, _WALK)
        return node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
    """The expression sent through one of the filters above."""
    if not isinstance(node, nodes.Expr):
        raise TypeError("only an expression can be filtered")
    if name == _WALK and isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _static_cost(node: nodes.Node) -> int:
    """Characters and nodes that one turn of a loop body can copy without any operation."""
    own = len(node.data) if isinstance(node, nodes.TemplateData) else ITEM_COST
    return own + sum(_static_cost(child) for child in node.iter_child_nodes())


class BoundedNamespace(Namespace):
    """Jinja's namespace without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        """As ``dict``; the odd signature lets a template store a name ``self``."""
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("a namespace name must be text that does not start with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One render's environment; it carries the meter, so nothing about a render is shared or ambient."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, meter: Meter, *, helpers: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            cache_size=0,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.meter = meter
        del self.globals["lipsum"]
        self.globals |= {"dict": _make_dict, "namespace": BoundedNamespace} | dict(helpers)
        self.filters = _FILTERS

    def compile_bounded(self, source: str) -> CodeType:
        """Code of a template for ``Template.from_code`` with an environment of this class."""
        tree = self.parse(source)
        code: CodeType = self.compile(_Metering().visit(tree), filename="<chat template>")
        return code

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.meter.spend(1)
        return self._guarded(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.walk(argument)
        value = super().getitem(obj, argument)
        return self._guarded(obj, argument, value) if isinstance(argument, str) else value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        __self.meter.spend(1 + (len(owner) if isinstance(owner, str) else 0))
        for arg in args:
            if isinstance(arg, tuple):
                __self.meter.walk(arg)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.meter.spend(size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        OPERATOR_CHECKS[operator](self.meter, left, right)
        return super().call_binop(context, operator, left, right)

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.walk(value)
        return super().call_test(name, value, *args, **kwargs)

    def _guarded(self, obj: Any, name: str, value: Any) -> Any:
        guard = METHOD_GUARDS.get(name) if isinstance(obj, str | int | bytes) and callable(value) else None
        return value if guard is None else partial(guard, self.meter, value, obj)


@pass_context  # which also keeps Jinja from evaluating constants while it compiles
def _finalize(context: Context, value: object) -> str:
    return meter_of(context).text(value)


@pass_context
def _walk(context: Context, value: Any) -> Any:
    meter_of(context).walk(value)
    return value


@pass_context
def _copy(context: Context, value: Any) -> Any:
    meter_of(context).spend(size(value))
    return value


@pass_context
def _iterate(context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
    meter = meter_of(context)
    for value in values:
        meter.spend(cost)
        yield value


@pass_context
def _concatenate(context: Context, values: list[Any]) -> str:
    meter = meter_of(context)
    texts = [meter.text(value) for value in values]
    meter.produce(sum(map(len, texts)))
    return "".join(texts)


_FILTERS = FILTERS | {_ITERATE: _iterate, _CONCATENATE: _concatenate, _WALK: _walk, _COPY: _copy}

#: Names that a template finds without anybody passing them.
BUILT_IN_NAMES = frozenset(DEFAULT_NAMESPACE) | {"loop", "self", "super", "caller", "varargs", "kwargs"}
