"""Low-rank adapters on a frozen language model: trained in stages, resumed and exported; some stages train nothing."""

from __future__ import annotations

import json

from examples import further

# The base is bfloat16, the adapters float32. Only blocks 1 and 3 have some, so two of the four stages train nothing:
# one before all adapters, and one between them that passes gradients on. The embedding is tied, and frozen, too.
SCRIPT = """
import transformers
from mpirun.checkpoint.pretrained import Pretrained
STEPS, SCHEMES = 4, {"1f1b": {}, "fsdp": {"shards": 4}}
text = torch.randint(64, (STEPS * 8, 9), generator=torch.Generator().manual_seed(3))
data = [({"input_ids": piece[:-1]}, piece[1:]) for piece in text]
class Adapted(nn.Module):
    def __init__(self, base, inputs, outputs):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.up.weight)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)
def network():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=16, n_layer=4, n_head=2, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    net = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).requires_grad_(False)
    for number in (1, 3):
        attention = net.transformer.h[number].attn
        attention.c_attn, attention.c_proj = Adapted(attention.c_attn, 16, 48), Adapted(attention.c_proj, 16, 16)
    return net
def loss(output, target):
    return cross_entropy(output.logits.float().flatten(0, 1), target.flatten())
def trained(scheme, name, resumes=False):
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    cut = mpirun.split(network(), example, points=[f"transformer.h.{number}" for number in (1, 2, 3)])
    options = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "clip": 0.01, "microbatches": 4, **SCHEMES[scheme]}
    with engine(cut, scheme, loss=loss, canonical=True, verify=not resumes, **options) as run:
        loader, numbers = run.loader(data, 2), []
        assert run.resume(folder / name, data=loader) == resumes
        for batch in loader:
            result = run.step(batch)
            numbers.append((result.loss, result.grad_norm))
            if run.steps == 2:
                run.save(folder / name, data=loader)
        assert resumes or run.verify()
        run.export(folder / f"{name} by {scheme}")
        return numbers, [[*shape.parameter_names] for shape in run.session.setup.shapes]
def plain():
    net, numbers = network(), []
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    for step in text.view(STEPS, 4, 2, -1):
        losses = [loss(net(input_ids=piece[:, :-1]), piece[:, 1:]) / 4 for piece in step]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((sum(x.item() for x in losses), norm.item()))
    return net, numbers
net, expected = plain()
for scheme, other in json.loads(sys.argv[2]):
    numbers, names = trained(scheme, scheme)
    torch.testing.assert_close(numbers, expected, rtol=1e-3, atol=0)
    assert len(numbers) == STEPS and [len(of_stage) for of_stage in names] == [0, 4, 0, 4]
    assert trained(other, scheme, resumes=True)[0] == numbers[2:]
    adapters, first = {name for of_stage in names for name in of_stage}, None
    for by in (scheme, other) if rank == 0 else ():
        saved, loaded = Pretrained(folder / f"{scheme} by {by}"), network()
        values = saved(saved.names)
        missing, unexpected = loaded.load_state_dict(values, strict=False)
        assert missing == ["lm_head.weight"] and not unexpected
        for (name, p), q in zip(loaded.named_parameters(), net.parameters(), strict=True):
            # Adapters move by 1e-2 a step; sums of bfloat16, in another order, are not quite the same.
            assert (p - q).abs().max() < 1e-3 if p.requires_grad else p.equal(q)
            assert name not in values or values[name].dtype == (torch.float32 if name in adapters else torch.bfloat16)
        first = first or values
        assert values.keys() == first.keys() > adapters and all(values[name].equal(first[name]) for name in first)
"""


def test_adapters_train_as_in_torch_go_on_under_another_scheme_and_are_exported_with_their_base(execute, tmp_path):
    """With the bits of one process; the base is unchanged."""
    pairs = [["1f1b", "fsdp"], *further(["fsdp", "1f1b"])]
    out = execute(4, SCRIPT, tmp_path, json.dumps(pairs)).out
    assert out.count("verify: passed: every bit") == len(pairs), out
