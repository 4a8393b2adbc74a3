# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Qwen3-30B-A3B
MODEL_NAME=qwen3-30b-a3b
MODEL_ARGS=(
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
  --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
  --rotary-base 1000000 --rotary-percent 1.0
  --num-experts 128 --moe-ffn-hidden-size 768
  --moe-layer-freq 1 --moe-grouped-gemm
  --moe-router-topk 8 --moe-router-score-function softmax --moe-router-dtype fp32
  --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3
  --max-position-embeddings 40960 --norm-epsilon 1e-6
  --vocab-size 151936 --make-vocab-size-divisible-by 1187 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
