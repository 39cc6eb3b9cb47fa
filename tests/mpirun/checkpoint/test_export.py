"""Exports: what four ranks trained becomes one directory, in the model's own names, that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpirun.checkpoint.pretrained import Pretrained
from mpirun.model.build_stage import build_stage
from mpirun.model.load_model import load_model

GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
TENSOR = "mpirun.examples.gpt:tensor"
PARTLY_FROZEN = "models_for_tests:partly_frozen"


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(directory.glob("*.safetensors")) for name, value in load_file(path).items()}


# Exports of several runs, each after its next step, if it should make one. Rank 0 prints why one stops.
EXPORT = """
from mpirun.checkpoint.pretrained import export
from mpirun.comm.fail_together import Stop
from mpirun.model.load_model import load_model
os.environ["WEIGHTS"] = sys.argv[1]
for file, name, exports in map(json.loads, sys.argv[2:]):
    try:
        with mpirun.Engine(file, lambda stages: load_model(name, stages, 0), threads=1, timeout=0) as run:
            for makes_a_step, to, source in exports:
                makes_a_step and run.step()
                with contextlib.redirect_stderr(sys.stdout):
                    export(run.checkpoints.session.part, to, source)
    except Stop as stop:
        rank or print(stop)
"""


@pytest.fixture(scope="module")
def exported(scripts, compiled, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of all exports, with the directory `source` that they began with, and what was printed."""
    folder = tmp_path_factory.mktemp("exports")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text("{}")
    (folder / "source" / "pytorch_model.bin").write_text("old")
    saved = tensors(folder / "source")
    saved["lm_head.weight"], saved["odd"] = saved.pop("transformer.wte.weight"), torch.ones(1)
    shutil.copytree(folder / "source", folder / "renamed")
    save_file(saved, folder / "renamed" / "model.safetensors")
    skip = {"stages": 4, "edges": [[0, 1], [0, 3], [1, 2], [2, 3]], "per_consumer": [0]}  # of the tied embedding
    chain = compiled("1f1b", workers=4, microbatches=4, graph=skip)
    divided = compiled("fsdp", workers=4, microbatches=4, shards=4, graph=skip)
    graph = {"stages": 8, "replicated": [0]}
    slices = compiled("1f1b", stages=2, tensor=2, microbatches=4, graph=graph)
    gpt2 = "pretrained_models:gpt2"
    four = compiled("1f1b", stages=1, tensor=4, microbatches=4, graph={"stages": 2})
    source, renamed = str(folder / "source"), str(folder / "renamed")
    runs = [
        (chain, gpt2, [(False, "unchanged", source), (True, "chain", renamed), (False, "chain", None)]),
        (divided, gpt2, [(True, "divided", None)]),
        (slices, TENSOR, [(False, "shards", None)]),
        (four, PARTLY_FROZEN, [(False, "frozen slices", None)]),
    ]
    lines = [
        json.dumps((str(file), model, [(steps, str(folder / to), of) for steps, to, of in exports]))
        for file, model, exports in runs
    ]
    (result,) = scripts(4, [[EXPORT, folder / "source", *lines]])
    assert result.code == 0, result.err
    return folder, result.out.splitlines()


def test_weights_that_are_not_trained_are_written_as_they_were_read(exported) -> None:
    folder, _ = exported
    source, unchanged = tensors(folder / "source"), tensors(folder / "unchanged")
    assert unchanged.keys() == source.keys()  # a tied parameter once, under its first name
    assert all(torch.equal(value, unchanged[name]) for name, value in source.items())


def test_transformers_load_it(exported) -> None:
    folder, _ = exported
    names = {path.name for path in (folder / "chain").iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00004.safetensors",
    } <= names
    assert "pytorch_model.bin" not in names and "model.safetensors" not in names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "chain")
    source = transformers.AutoModelForCausalLM.from_pretrained(folder / "source")
    written, tokens = tensors(folder / "chain"), torch.arange(8)[None]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, written[name])
    assert not torch.equal(loaded(tokens).logits, source(tokens).logits)
    assert set(Pretrained(folder / "chain").names) == written.keys()


def test_parts_are_put_together(exported) -> None:
    folder, _ = exported
    chain, divided = tensors(folder / "chain"), tensors(folder / "divided")
    assert chain.keys() == divided.keys()
    for name, value in chain.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "to"), [(TENSOR, "shards"), (PARTLY_FROZEN, "frozen slices")])
def test_tensor_slices_are_joined(exported, name: str, to: str) -> None:
    folder, _ = exported
    model = load_model(name, 2, 0)
    whole = {
        model.entry_name(stage, name): value
        for stage in range(2)
        for name, value in build_stage(model, stage, 0).state_dict().items()
    }
    written = tensors(folder / to)
    assert written.keys() == whole.keys() and all(torch.equal(value, written[name]) for name, value in whole.items())


def test_nothing_is_overwritten(exported) -> None:
    folder, printed = exported
    assert printed == [f"export {folder / 'chain'}: it is not empty: export to a new directory"]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("scheme", ["1f1b", "fsdp"])
def test_a_plain_module_loads_the_state(execute, scheme) -> None:
    script = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2))
        self.head.weight, self.again = self.embedding.weight, self.blocks[0]  # two names each
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.still, self.pooler = nn.BatchNorm1d(8).eval(), nn.Linear(8, 8)
        self.still.num_batches_tracked.fill_(7)  # which, like the pooler, the forward does not use
        self.pooler.again = self.pooler.bias

    def forward(self, x):
        x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = self.still(x + block(x))
        return self.head(self.again(x))

torch.manual_seed(0)
x, net, other = torch.randint(20, (32,)), Net(), Net()
cut = mpirun.split(net, x[:4], stages=2)
options = {"microbatches": 4, "loss": cross_entropy, "optimizer": torch.optim.Adam, "lr": 1e-2}
with engine(cut, sys.argv[1], stages=2, **options) as run:
    run.step((x[:16], x[16:]))
    tests = run.loader(TensorDataset(x, x), 4)
    found, state = run.evaluate(tests).loss, run.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    run.step((x[:16], x[16:]))
    if run.rank == 0:
        other.load_state_dict(state)
        print(abs(float(cross_entropy(other.eval()(x), x)) - found) < 1e-5)
        print(all(torch.equal(value, kept[name]) for name, value in state.items()))
        unused = [name for name in state if name.startswith("pooler") or name == "still.num_batches_tracked"]
        print(len(unused), all(torch.equal(state[name], net.state_dict()[name]) for name in unused))
    else:
        assert state == {}
"""
    execute(2, script, scheme, out=["True", "True", "4 True"])


def test_what_the_forward_does_not_use_is_exported_as_the_weights_or_the_module_have_it(execute, tmp_path) -> None:
    script = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.pooler = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)

torch.manual_seed(0)
x, first = torch.ones(4, 4), Net().state_dict()
(folder / "first").mkdir()
given = {name: value for name, value in first.items() if name != "pooler.bias"}
save_file(given, folder / "first" / "model.safetensors")
for device in ("cpu", "meta"):
    with torch.device(device):
        net = Net()
    with engine(mpirun.split(net, x[:2], stages=1), "ddp", weights=folder / "first") as run:
        run.step((x, x))
        run.export(folder / device)
    written = load_file(folder / device / "model.safetensors")
    print(torch.equal(written["pooler.weight"], first["pooler.weight"]), "pooler.bias" in written)
"""
    ended = execute(1, script, tmp_path, out=["True True", "True False"])
    why = "the forward does not use them, and on the meta device they have no values"
    (said,) = [line for line in ended.err.splitlines() if "not written" in line]
    assert said == f"mpirun: note: not written: pooler.bias: {why}"
