"""make test-examples: the examples of mpirun under several schemes, killed in the middle of an epoch, and exported.

Each runs on 4 ranks under each scheme, with canonical=True and without. The losses of the first steps must agree to
1e-6, those of digits, in float64, to 1e-10: later ones do not, for a ReLU that rounding turns on or off changes what
follows. With canonical=True all losses and weights must agree to the bit. Then a run is killed and started again: it
must end with the same bits. transformers must load the language model's export, with the same bits, also when a
finished run is started again only to export.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from processes import environment, mpiexec, processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mpirun.examples import byte_lm
from schedgen.cli.main import main as schedgen

SCHEMES = {
    "1f1b": ["1f1b"], "zb-h1": ["zb-h1"], "fsdp-shards": ["fsdp", "--shards", "4"], "gpipe": ["gpipe"], "ddp": ["ddp"],
}  # fmt: skip
BEGIN = """
import sys
from mpirun.examples import digits, finetune_lm
folder, schedule, out, mode = sys.argv[1:]
options = {"canonical": mode == "canonical", "log": lambda step, numbers: print("of step", step, repr(numbers["loss"]))}
"""
LM = BEGIN + 'finetune_lm.main(folder + "/model", folder + "/text", schedule, out, **options)'
DIGITS = BEGIN + "import torch; torch.set_default_dtype(torch.float64); "
DIGITS += 'digits.main(schedule, 2, out + "-checkpoints", **options)'
FIRST = 3  # steps
GRAPH = """
import sys, torch, mpirun
from transformers import AutoConfig, AutoModelForCausalLM
from mpirun.examples.finetune_lm import LENGTH
with torch.device("meta"):
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1] + "/model", use_cache=False))
cut = mpirun.split(net, {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}, stages=4)
open(sys.argv[1] + "/lm.graph", "w").write(cut.model(loss=print).graph().text())
"""


class Example:
    """One of the examples, in a folder."""

    def __init__(self, name: str, program: str, folder: Path, apart: float) -> None:
        self.name, self.program, self.folder, self.apart = name, program, folder, apart

    def command(self, scheme: str, canonical: bool, out: str) -> list[str]:
        mode = "canonical" if canonical else "plain"
        file = self.folder / f"{self.name}-{scheme}.json"
        return [*mpiexec(), "-n", "4", sys.executable, "-c", self.program, self.folder, file, self.folder / out, mode]

    def run(self, scheme: str, canonical: bool, out: str) -> list[float]:
        """Run the example to its end; return the losses of its steps."""
        done = subprocess.run(
            self.command(scheme, canonical, out), env=environment("x"), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [float(loss) for loss in re.findall(r"^of step \d+ (.*)$", done.stdout, re.M)]

    def kill_after(self, seconds: float, scheme: str, out: str) -> None:
        """Run the example, and send SIGKILL to all ranks `seconds` after the first checkpoint."""
        marker = hashlib.sha256(out.encode()).hexdigest()
        job = subprocess.Popen(
            self.command(scheme, True, out), env=environment(marker), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not list((self.folder / f"{out}-checkpoints").glob("step-*/manifest.json")):
            assert job.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.05)
        time.sleep(seconds)
        for pid in processes(marker):
            os.kill(pid, signal.SIGKILL)
        job.wait()

    def weights(self, out: str) -> dict[str, str]:
        """By entry, a hash of its value in the newest checkpoint."""
        newest = max((self.folder / f"{out}-checkpoints").glob("step-*"))
        values = {name: x for file in newest.glob("weights-*.safetensors") for name, x in load_file(file).items()}
        return {name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in sorted(values.items())}


def check(example: Example, schemes: list[str]) -> None:
    """Compare all schemes of one example, and a run that is killed."""
    losses, weights = {}, {}
    for scheme in schemes:
        for canonical in (False, True):
            out = f"{example.name}-{scheme}-{canonical}"
            begin = time.perf_counter()
            losses[scheme, canonical] = example.run(scheme, canonical, out)
            weights[scheme, canonical] = example.weights(out)
            steps, last = len(losses[scheme, canonical]), losses[scheme, canonical][-1]
            print(f"{out}: {time.perf_counter() - begin:.0f} s, {steps} steps, last loss {last:.4f}", flush=True)
    first = schemes[0]
    own = ("running_", "num_batches")  # statistics are of one worker's data
    trained = [name for name in weights[first, True] if not any(part in name for part in own)]
    for scheme in schemes:
        pairs = [*zip(losses[scheme, False], losses[first, True], strict=True)][:FIRST]
        apart = max(abs(a - b) / abs(b) for a, b in pairs)
        assert len(pairs) == FIRST and apart < example.apart, (scheme, apart)
        assert losses[scheme, True] == losses[first, True], scheme
        assert all(weights[scheme, True][name] == weights[first, True][name] for name in trained), scheme
        print(f"{example.name} {scheme}: first losses {apart:.1e} from {first}'s, canonical: the same bits", flush=True)
    out = f"{example.name}-killed"
    example.kill_after(0.3, first, out)
    example.run(first, True, out)
    assert example.weights(out) == weights[first, True]
    print(f"{example.name}: killed and started again, the same bits")


def check_export(example: Example, scheme: str) -> None:
    """Assert that transformers loads the export, with the bits of the newest checkpoint."""
    folder = example.folder / f"{example.name}-{scheme}-True"
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    newest = max((example.folder / f"{folder.name}-checkpoints").glob("step-*"))
    values = {name: x for file in newest.glob("weights-*.safetensors") for name, x in load_file(file).items()}
    assert all(torch.equal(loaded[name], x) for name, x in values.items() if name in loaded)
    assert len(loaded.keys() & values.keys()) >= len(loaded) - 1  # the head is tied
    print(f"{example.name}: transformers loads the export of {scheme}: {len(loaded)} tensors, the same bits")


def main() -> None:
    """Run what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1f1b only")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        byte_lm.main(str(folder / "model"))
        (folder / "text").write_text(Path(__file__).read_text()[:4000])
        subprocess.run([sys.executable, "-c", GRAPH, folder], check=True)
        sizes = ["--workers", "4", "--microbatches", "8"]
        for scheme, arguments in SCHEMES.items():
            file = folder / f"digits-{scheme}.json"
            assert schedgen(["compile", *arguments, *sizes, "--stages", "4", "-o", str(file)]) == 0
            graph = str(folder / "lm.graph")
            file = folder / f"lm-{scheme}.json"
            assert schedgen(["compile", *arguments, *sizes, "--graph", graph, "-o", str(file)]) == 0
        schemes = ["1f1b"] if quick else [*SCHEMES]
        lm, digits = Example("lm", LM, folder, 1e-6), Example("digits", DIGITS, folder, 1e-10)
        check(lm, schemes[:3])
        for scheme in schemes[:3]:
            check_export(lm, scheme)
        shutil.rmtree(folder / "lm-1f1b-True")
        assert lm.run("1f1b", True, "lm-1f1b-True") == []  # all steps are done
        check_export(lm, "1f1b")
        check(digits, schemes)


if __name__ == "__main__":
    main()
