# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Qwen3-14B
MODEL_NAME=qwen3-14b
MODEL_ARGS=(
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408
  --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128
  --qk-layernorm
  --rotary-base 1000000 --rotary-percent 1.0
  --max-position-embeddings 40960 --norm-epsilon 1e-6
  --vocab-size 151936 --make-vocab-size-divisible-by 1187 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
