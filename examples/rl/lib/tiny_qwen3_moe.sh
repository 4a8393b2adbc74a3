# shellcheck shell=bash
# A Qwen3-MoE small enough for a laptop (musa_titan/rl/rehearsal/assets.py writes its weights).

# shellcheck disable=SC2034 # the script that sources this uses them
MODEL_ARGS=(
  --num-layers 2
  --hidden-size 64
  --ffn-hidden-size 128
  --num-attention-heads 4
  --group-query-attention
  --num-query-groups 2
  --kv-channels 16
  --qk-layernorm
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --position-embedding-type rope
  --rotary-base 1000000
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
  --vocab-size 64
  --make-vocab-size-divisible-by 1
  --num-experts 4
  --moe-ffn-hidden-size 32
  --moe-layer-freq "[1]*2"
  --moe-router-topk 2
  --moe-router-score-function softmax
  --moe-router-dtype fp32
  --moe-router-load-balancing-type none
  --moe-aux-loss-coeff 0
  --moe-token-dispatcher-type alltoall
)

# Megatron's own layers, and none of its fused kernels.
# shellcheck disable=SC2034
CPU_ARGS=(
  --transformer-impl local
  --distributed-backend gloo
  --use-cpu-initialization
  --attention-backend unfused
  --no-rope-fusion
  --no-masked-softmax-fusion
  --no-bias-swiglu-fusion
  --no-bias-dropout-fusion
  --no-gradient-accumulation-fusion
  --no-persist-layer-norm
)
