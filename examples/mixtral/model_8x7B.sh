# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Mixtral 8x7b
MODEL_NAME=mixtral-8x7b
MODEL_ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
  --rotary-base 1000000 --rotary-percent 1.0
  --num-experts 8 --moe-ffn-hidden-size 14336
  --moe-layer-freq 1 --moe-grouped-gemm
  --moe-router-topk 2 --moe-router-score-function softmax --moe-router-dtype fp32
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
  --max-position-embeddings 32768 --norm-epsilon 1e-5
  --vocab-size 32000 --make-vocab-size-divisible-by 4000 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
