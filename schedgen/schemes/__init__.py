"""Every built-in scheme: a module with a docstring and `scheme(sizes) -> Scheme`.

Each w and n stands there as its paper writes it. `load` also reads a user's
own file, which defines `w` (of s, b, d and perhaps the shard t or the part k)
and `n` and, if it likes, `cap`, `edges`, `apart`, `mode`, `split`, `updates`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from schedgen.ir.graph_file import check_apart
from schedgen.ir.stage_graph import check_edges
from schedgen.ir.weight_versions import UPDATES
from schedgen.schemes import (
    breadth_first,
    chimera,
    ddp,
    depth_first,
    dualpipe_v,
    fsdp,
    fslpp,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    lpp,
    one_f_one_b,
    pipedream,
    pipedream_flush,
    round_robin,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes, bind_sizes, fourth_argument
from schedgen.util.errors import UsageError, raised

SCHEMES: dict[str, ModuleType] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "lpp": lpp,
    "fslpp": fslpp,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "depth-first": depth_first,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
    "chimera": chimera,
    "pipedream-flush": pipedream_flush,
    "1f1b-rr": round_robin,
    "pipedream": pipedream,
}


def load(name: str, sizes: Sizes, tensor: int = 1) -> Scheme:
    """The scheme called `name`, or the one that the file `name` defines.

    `tensor`: shards of each stage. Workers that do not know of shards are that many each.
    """
    if name in SCHEMES:
        sizes = _without_shards(sizes, tensor)
        module = SCHEMES[name]
        for option in ("groups", "chunks", "replicas"):
            if getattr(sizes, option) is not None and option not in module.PARAMETERS:
                raise UsageError(f"{name} takes no --{option}")
        scheme: Scheme = module.scheme(sizes)
        return scheme
    if not name.endswith(".py"):
        near = [f"; did you mean {one}?" for one in difflib.get_close_matches(name, SCHEMES, 1)]
        known = f"it is one of {', '.join(SCHEMES)}, or a file that ends in .py or .csv"
        raise UsageError(f"there is no scheme '{name}': {known}{''.join(near)}")
    return _from_file(Path(name), sizes, tensor)


def _without_shards(sizes: Sizes, tensor: int) -> Sizes:
    if sizes.workers is None:
        return sizes
    if sizes.workers % tensor:
        raise UsageError(f"--tensor {tensor}: {sizes.workers} workers are no multiple of it")
    return sizes._replace(workers=sizes.workers // tensor)


def _from_file(path: Path, sizes: Sizes, tensor: int) -> Scheme:
    if not path.stem.isprintable():
        raise UsageError(f"{path}: a scheme is called as its file is, and that is not printable")
    spec = importlib.util.spec_from_file_location(f"schedgen_scheme_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} cannot be loaded: {raised(error)}") from None
    finally:
        sys.dont_write_bytecode = writes
    for wanted in ("w", "n"):
        if not callable(getattr(module, wanted, None)):
            raise UsageError(f"{path} defines no function {wanted}(s, b, d)")
    shards = fourth_argument(module.w) == "t"
    if not shards:
        sizes = _without_shards(sizes, tensor)
    options = sizes._asdict()
    edges = getattr(module, "edges", None)
    if callable(edges):
        try:
            edges = bind_sizes(edges, options)()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{path}: edges() raised {raised(error)}") from None
    edges = None if edges is None else check_edges(edges, sizes.stages)
    apart = getattr(module, "apart", ())
    if not isinstance(apart, (list, tuple)) or (apart and edges is None):
        raise UsageError(f"{path}: apart is a list of stages, for a module with edges")
    mode = getattr(module, "mode", "greedy")
    if not isinstance(mode, str) or mode not in ("greedy", "strict"):
        raise UsageError(f"{path}: mode must be 'greedy' or 'strict', not {mode!r}")
    updates = getattr(module, "updates", "flush")
    if not isinstance(updates, str) or updates not in UPDATES:
        raise UsageError(f"{path}: updates must be {', '.join(map(repr, UPDATES))}, not {updates!r}")
    cap = getattr(module, "cap", None)
    return Scheme(
        name=path.stem,
        workers=sizes.workers,
        w=bind_sizes(module.w, options),
        n=bind_sizes(module.n, options),
        order=path.stem,
        mode=mode,
        split=bool(getattr(module, "split", False)),
        parameters={
            k: list(v) if isinstance(v, tuple) else v
            for k in ("groups", "chunks", "replicas")
            if (v := options[k]) is not None
        },
        cap=None if cap is None else bind_sizes(cap, options),
        edges=edges,
        per_consumer=check_apart(apart, edges) if edges else (),
        updates=updates,
        by_shard=shards,
    )


def describe() -> str:
    """One paragraph a scheme: name, parameters, first line of its docstring, its w."""
    lines = []
    for name, module in SCHEMES.items():
        options = " ".join(f"--{option}" for option in ("stages", "microbatches", *module.PARAMETERS))
        lines += [f"{name}  {options}", *(f"    {line}" for line in inspect.getdoc(module).splitlines() if line), ""]  # type: ignore[union-attr]
    return "\n".join([*lines, f"Orders for --n: {', '.join(ORDERS)}."])
