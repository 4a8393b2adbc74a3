"""Flag sets of small models. Lists concatenate; later flags win, as in argparse."""

from __future__ import annotations

BASE = """
--transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --make-vocab-size-divisible-by 1
--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --clip-grad 1.0 --seed 7
--log-interval 1 --eval-iters 0 --eval-interval 1000 --distributed-backend nccl --num-workers 0
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --attention-backend unfused
--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --swiglu --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights
""".split()

DENSE = [*BASE, "--num-layers", "4"]

DEEPSEEK = (
    BASE
    + (
        """
--num-layers 4 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
--v-head-dim 16 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --ffn-hidden-size 128
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4
--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
--moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]+[1]*3) --mtp-num-layers 1 --qk-layernorm
"""
    ).split()
)
"""DeepSeek-V3 in small: MLA, group-limited sigmoid router with bias, a dense first layer, a shared expert, MTP."""


def parallel(pp: int = 1, tp: int = 1, ep: int = 1, vpp_layers: int | None = None) -> list[str]:
    """Layout flags; `vpp_layers` is the number of layers of one virtual stage."""
    flags = ["--pipeline-model-parallel-size", str(pp), "--tensor-model-parallel-size", str(tp)]
    flags += ["--expert-model-parallel-size", str(ep)]
    if vpp_layers is not None:
        flags += ["--num-layers-per-virtual-pipeline-stage", str(vpp_layers)]
    return flags
