"""What a parameter may not have in a module from which a stage is made: a hook, or a class of its own."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from schedgen.util.errors import UsageError

HOOKS = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}
PLAIN = nn.Parameter, nn.UninitializedParameter, FakeTensor  # classes that stages keep, or that torch refuses


def check_parameters(module: nn.Module, what: str) -> None:
    """UsageError if parameters have hooks, or trained ones a class of their own, which those of a stage would not have.

    `what`: the module, for the message.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and type(parameter) not in PLAIN:
            kind = type(parameter).__name__
            instead = "which a stage would make an nn.Parameter: mark it by an attribute instead"
            raise UsageError(f"{what}: its parameter {name} is a {kind}, {instead}")
        if method := hooked_by(parameter):
            raise UsageError(f"{what}: its parameter {name} has a hook ({method}), which a stage would not call")


def hooked_by(parameter: nn.Parameter) -> str:
    """The method that has given a parameter a hook; empty: it has none."""
    return next((method for method, attribute in HOOKS.items() if getattr(parameter, attribute, None)), "")
