"""A module's forward as a graph, by torch.export; UsageError if the graph would not do what the forward does.

In: a module and an example of a microbatch's input. Out: an `ExportedGraph`. Nothing is computed: tensors have no data.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from mpirun.model.meta_values import is_on_meta
from mpirun.model.module_tensors import place, use_dense_gradients
from mpirun.model.split.errors import check_hooks, export_error, line_of_forward, line_of_node
from mpirun.model.split.split_result import Example, ModuleOutput
from schedgen.util.errors import UsageError

LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.recording")
ASSERT_TYPE = torch.ops.aten._assert_tensor_metadata.default  # asserts the traced type, which autocast changes
REGIONS = {"wrap_with_set_grad_enabled": torch.set_grad_enabled, "wrap_with_autocast": torch.autocast}


class ExportedGraph(NamedTuple):
    """The graph of one microbatch's forward; nodes are in the order of execution.

    Nodes that torch.no_grad or autocast surround have these in `meta["regions"]`, the outermost first: pairs of a
    context manager's class and its arguments.
    """

    graph: fx.Graph
    inputs: dict[fx.Node, int]  # by placeholder, the leaf of the input
    state: dict[str, Any]  # what get_attr nodes refer to; a parameter has one name only
    parameters: dict[str, nn.Parameter]
    temporary: set[str]  # the names of buffers that are not saved
    example: Example
    spec: pytree.TreeSpec  # of the output

    def output(self) -> tuple[list[fx.Node], ModuleOutput]:
        """What the last stage returns, and how the module's own output is made from it."""
        results: Any = self.graph.output_node().args[0]
        nodes = list(dict.fromkeys(leaf for leaf in results if isinstance(leaf, fx.Node)))
        leaves = [nodes.index(leaf) if isinstance(leaf, fx.Node) else None for leaf in results]
        constants = [None if isinstance(leaf, fx.Node) else leaf for leaf in results]
        return nodes, ModuleOutput(leaves, constants, self.spec)


def export_graph(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedGraph:
    """The graph of `module(*args, **kwargs)`; UsageError, with the line that is the reason, if it cannot be traced."""
    # torch.export would merge a tensor that is given twice, or that is a buffer too
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    where: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if is_on_meta(module):
        where = torch.device("meta")
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{line_of_forward(module)}: cannot be called with the example: {error}") from None
    check_hooks(module)
    use_dense_gradients(module)
    export = torch.export.export
    if torch.__version__ < "2.7":  # before 2.7 export makes a graph for inference
        export = getattr(torch.export, "export_for_training", export)
    try:
        with (
            _silent(),
            _refusing_untraced(),
            _refusing_assigned_buffers(module),
            torch.compiler.set_stance("force_eager"),  # compiled functions run uncompiled
            where,
        ):
            program = export(module, args, kwargs, strict=False)
            exported = program.module()
    except Exception as error:
        raise export_error(module, error) from None
    graph = exported.graph
    graph.set_codegen(fx.graph.CodeGen())
    _inline_regions(exported)
    _check_nodes(graph)
    state = _state(module, exported, graph)
    spec = program.call_spec.in_spec
    numbers = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    order = pytree.tree_leaves((numbers[0], {name: numbers[1][name] for name in kwargs}))
    placeholders = graph.find_nodes(op="placeholder")
    traced = ExportedGraph(
        graph,
        {placeholders[number]: leaf for leaf, number in enumerate(order)},
        state,
        {name: parameter for name, parameter in module.named_parameters() if state.get(name) is parameter},
        {name for name, _ in module.named_buffers() if name not in module.state_dict()} | {*program.constants},
        Example(*pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))),
        program.call_spec.out_spec,
    )
    if not traced.output()[0]:
        raise UsageError(f"{line_of_forward(module)}: returns no tensor")
    return traced


def _inline_regions(exported: fx.GraphModule) -> None:
    """Replace each node that runs a region under no_grad or autocast, a graph of its own, by the operations in it."""
    graph = exported.graph
    nodes = list(graph.nodes)
    for node in nodes:  # it grows, as regions may have others in them
        codes = {x: attrgetter(str(x.target))(exported) for x in node.all_input_nodes if x.op == "get_attr"}
        called = next((x for x, value in codes.items() if isinstance(value, fx.GraphModule)), None)
        if called is None:
            continue
        if str(node.target) not in REGIONS:
            raise UsageError(f"{line_of_node(node)}: runs a graph of its own ({node.target}), which cannot be cut")
        index = node.args.index(called)
        region, operands = (REGIONS[str(node.target)], node.args[:index]), node.args[index + 1 :]
        inside = codes[called].graph
        new = dict(zip(inside.find_nodes(op="placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            for inner in inside.nodes:
                if inner.op in ("call_function", "get_attr"):
                    new[inner] = copied = graph.node_copy(inner, new.__getitem__)
                    copied.meta["regions"] = (*node.meta.get("regions", ()), region)
                    if inner.op == "get_attr":
                        copied.target = f"{called.target}.{inner.target}"
                    nodes.append(copied)
        for result in list(node.users):
            result.replace_all_uses_with(new[inside.output_node().args[0][result.args[1]]])
            graph.erase_node(result)
        graph.erase_node(node)
        if not called.users:
            graph.erase_node(called)


def _check_nodes(graph: fx.Graph) -> None:
    """Take out asserted types, and refuse numbers and shapes that depend on data, and reads of memory by strides."""
    for node in graph.find_nodes(op="call_function", target=ASSERT_TYPE):
        graph.erase_node(node)
    for node in graph.nodes:
        value, why = node.meta.get("val"), ""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            why = "a number is taken out of a tensor, which tracing cannot follow; use tensors"
        elif isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            why = "the shape depends on data, but should be the same for every microbatch"
        elif node.target is torch.ops.aten.as_strided.default:
            why = "as_strided depends on strides, which may differ in a stage; use view, unfold or narrow"
        if why:
            raise UsageError(f"{line_of_node(node)}: {why}")


def _state(module: nn.Module, exported: fx.GraphModule, graph: fx.Graph) -> dict[str, Any]:
    """By name, what get_attr nodes refer to; changes the graph so that each parameter has one node and one name.

    What a module keeps in a tuple or a partial is a constant of the trace, unless it is a parameter of the module.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    own = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
    names = {place(x): name for name, x in reversed(parameters.items())}  # the first of several
    trained = {place(x)[0]: name for name, x in parameters.items() if x.requires_grad}
    state: dict[str, Any] = {}
    first: dict[str, fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        value = own.get(node.target)
        if value is None:
            value = attrgetter(str(node.target))(exported)
        if isinstance(value, Tensor) and place(value) in names:
            node.target = names[place(value)]
            value = parameters[node.target]
        elif isinstance(value, Tensor) and (name := trained.get(place(value)[0])):
            raise UsageError(
                f"{line_of_node(next(iter(node.users), node))}: reads a view of the parameter {name} that the module "
                "keeps, which would be a constant: take the view in forward"
            )
        state[node.target] = value
        if first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)
    return state


@contextlib.contextmanager
def _refusing_untraced() -> Iterator[None]:
    """Refuse what torch.export would drop although gradients depend on it: it traces only forward operations."""

    def refuse(what: str) -> Callable[..., NoReturn]:
        def refused(*_: object, **__: object) -> NoReturn:
            raise UsageError(f"{what} cannot be traced: its gradients would be wrong")

        return refused

    function = refuse("a torch.autograd.Function, as of a reentrant checkpoint,")
    with (
        mock.patch.object(torch.autograd.Function, "apply", function),
        mock.patch.object(Tensor, "register_hook", refuse("a hook on a tensor")),
    ):
        yield


@contextlib.contextmanager
def _refusing_assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Refuse a buffer that becomes another tensor: torch.export follows that of the root's buffers only."""
    parts = {*module.modules()}

    def assign(part: nn.Module, name: str, value: Tensor | None) -> None:
        if part in parts and value is not part._buffers.get(name):
            raise UsageError(f"cannot be traced: sets the buffer {name}; change it in place, as by copy_")

    hook = register_module_buffer_registration_hook(assign)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.ExitStack() as inside, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        for name in LOGS:
            inside.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        warnings.simplefilter("ignore")
        yield
