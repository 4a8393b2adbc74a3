# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Llama-3.1 405B, with the scaled rotation of 3.1
MODEL_NAME=llama3-405b
MODEL_ARGS=(
  --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
  --num-attention-heads 128 --group-query-attention --num-query-groups 8 --kv-channels 128
  --rotary-base 500000 --rotary-percent 1.0
  --use-rope-scaling --rope-scaling-factor 8.0
  --max-position-embeddings 131072 --norm-epsilon 1e-5
  --vocab-size 128256 --make-vocab-size-divisible-by 16032 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
