# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Qwen3-0.6B
MODEL_NAME=qwen3-0.6b
MODEL_ARGS=(
  --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
  --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128
  --qk-layernorm
  --rotary-base 1000000 --rotary-percent 1.0
  --max-position-embeddings 40960 --norm-epsilon 1e-6
  --vocab-size 151936 --make-vocab-size-divisible-by 1187
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
