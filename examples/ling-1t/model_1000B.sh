# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Ling-1T. Half of each head is rotated.
MODEL_NAME=ling-1t
MODEL_ARGS=(
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 18432
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
  --rotary-base 600000 --rotary-percent 0.5
  --num-experts 256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq '([0]*4+[1]*76)' --moe-grouped-gemm
  --moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-dtype fp32
  --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --max-position-embeddings 32768 --norm-epsilon 1e-6
  --vocab-size 157184 --make-vocab-size-divisible-by 19648 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
