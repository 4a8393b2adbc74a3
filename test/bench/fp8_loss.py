"""Does training in FP8 reach the loss of training in bf16? Real Megatron on the quickstart's corpus, several seeds.

``python -m test.bench.fp8_loss [--seeds 1 2 3] [--steps 300] [--model dense|deepseek]``: minutes. For each seed, the
same run in bf16 and in each recipe; the held-out loss after the last step, and the mean of the last 30 training losses.
The second bf16 run differs from the first in rounding alone and shows how much of a difference is chance: the mean over
seeds is what counts. The last line is one JSON object; ``worst_mean_held_out_percent``, over the FP8 recipes, is to
stay below 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import mean

from test.integration.flags import BASE
from test.integration.runner import Runner

E4M3 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
RECIPES = {
    "bf16": [],
    "bf16, halved micro-batches": ["--micro-batch-size", "4"],
    "block, pow2 scales": [*E4M3, "--musa-fp8-scale", "pow2"],
    "block, fp32 scales": [*E4M3, "--musa-fp8-scale", "mt"],
    "block, E5M2 gradients": ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"],
    "tensorwise, hybrid": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "delayed, hybrid": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "16",
                        "--fp8-amax-compute-algo", "max"],
}  # fmt: skip
MODELS = {
    "dense": "--ffn-hidden-size 384".split(),
    "deepseek": """--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16
        --v-head-dim 32 --qk-layernorm --ffn-hidden-size 384 --moe-layer-freq ([0]+[1]*3) --num-experts 8
        --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96 --moe-router-topk 2
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
        --moe-token-dispatcher-type alltoall --moe-grouped-gemm""".split(),
}
TRAINING = """--num-layers 4 --hidden-size 128 --seq-length 128 --max-position-embeddings 128 --bf16
--micro-batch-size 8 --global-batch-size 8 --lr 1e-3
--lr-warmup-iters 20 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --vocab-size 257
--split 95,5,0 --eval-iters 20""".split()
HELD_OUT = re.compile(r"validation loss at iteration \d+ .*?lm loss value: ([0-9.E+-]+)")


def make_corpus(directory: Path) -> Path:
    """The standard library's modules as byte-level tokens."""
    library = sysconfig.get_paths()["stdlib"]
    command = [sys.executable, "-m", "musa_titan.recipe.corpus", str(directory / "modules"), library]
    subprocess.run([*command, "--include", "*.py"], check=True, capture_output=True)
    return directory / "modules"


def train(runner: Runner, directory: Path, flags: list[str], steps: int) -> tuple[float, float]:
    """(held-out loss at the end, mean of the last training losses)."""
    job = runner.run([*flags, "--train-iters", str(steps), "--eval-interval", str(steps)], directory, timeout=1800)
    held_out = HELD_OUT.findall(job.ranks[0].log)
    return float(held_out[-1]), mean(job.lm_losses[-30:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    options = parser.parse_args()
    runner = Runner()
    deltas: dict[str, list[float]] = {name: [] for name in options.recipes if name != "bf16"}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        base = [flag for flag in BASE if flag != "--mock-data"]
        data = ["--data-path", str(make_corpus(directory)), "--data-cache-path", str(directory / "cache")]
        for seed in options.seeds:
            common = [*base, *MODELS[options.model], *TRAINING, *data, "--seed", str(seed)]
            exact = train(runner, directory / f"bf16-{seed}", common, options.steps)
            print(f"seed {seed} bf16: held-out {exact[0]:.4f}, training {exact[1]:.4f}", flush=True)
            for name in deltas:
                found = train(runner, directory / f"{name}-{seed}", common + RECIPES[name], options.steps)
                percent = [100 * (ours - theirs) / theirs for ours, theirs in zip(found, exact, strict=True)]
                deltas[name].append(percent[0])
                print(f"seed {seed} {name}: held-out {percent[0]:+.2f} %, training {percent[1]:+.2f} %", flush=True)
    runner.close()
    means = {name: round(mean(found), 3) for name, found in deltas.items()}
    rounded = {name: [round(delta, 3) for delta in found] for name, found in deltas.items()}
    worst = max((abs(value) for name, value in means.items() if not name.startswith("bf16")), default=0.0)
    print(json.dumps({"mean_held_out_percent": means, "by_seed": rounded, "worst_mean_held_out_percent": worst}))


if __name__ == "__main__":
    main()
