"""Queries of the header: the model stage of a stage, the owners of a unit, whether there is a flush."""

from __future__ import annotations

import numpy as np
import pytest

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

EDGES = ((0, 1), (0, 2), (1, 3), (2, 3))


def header(name, sizes, tensor=1, edges=None, per_consumer=(), **options):
    scheme = load(name, sizes, tensor)._replace(edges=edges, per_consumer=per_consumer)
    return compile(scheme, sizes, Options(tensor=tensor, **options)).header


@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_the_graph_and_the_ties_of_the_model_have_no_slices(tensor):
    options = {"edges": EDGES, "per_consumer": (0,), "tied": ((0, 3),)}
    plain = header("1f1b", Sizes(4, 4), **options)
    found = header("1f1b", Sizes(4, 4), tensor, replicated_stages=(0,) if tensor > 1 else (), **options)
    assert (found.stages, found.model_stages) == (4 * tensor, 4)
    assert found.model_graph == plain.graph and found.model_ties == plain.tied == ((0, 3),)
    stages = np.arange(found.stages, dtype=np.int32)
    assert found.model_stage(stages).tolist() == np.repeat(range(4), tensor).tolist()
    assert [s for s in stages.tolist() if found.is_first_slice(s)] == [*found.first_slices]
    of_slices = [stages for tie, stages in enumerate(found.tied) if found.ties_slices(tie)]
    split = (1, 2) if tensor > 1 else ()
    assert of_slices == [tuple(range(s * tensor, (s + 1) * tensor)) for s in split]


@pytest.mark.parametrize(("name", "shards"), [("1f1b", 1), ("fsdp", 1), ("fsdp", 2), ("ddp", 1), ("fsdp", 4)])
def test_every_unit_has_the_owners_that_own_it(name, shards):
    found = header(name, Sizes(4, 4, 4, shards=(shards,)))
    units = found.weight_shards.units
    for unit in units:
        ranks = [rank for rank in range(4) if unit in found.units_of(rank)]
        assert tuple(ranks) == found.weight_shards.holders(*unit) and found.first_owner(*unit) == ranks[0]
    assert {stage for stage, shard in units if shard >= 0} == {s for s in range(found.stages) if found.is_sharded(s)}
    assert any(map(found.is_sharded, range(found.stages))) == (shards > 1)
    assert found.is_owner.sum() == sum(len(found.units_of(rank)) for rank in range(4))


@pytest.mark.parametrize(("name", "versions"), [("1f1b", 1), ("fsdp", 1), ("pipedream", 9), ("pipedream-2bw", 9)])
def test_weights_have_one_version_where_there_is_a_flush(name, versions):
    found = header(name, Sizes(4, 8))
    assert found.weight_versions.count == versions and found.has_flush == (versions == 1)
