# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Llama-3 70B
MODEL_NAME=llama3-70b
MODEL_ARGS=(
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128
  --rotary-base 500000 --rotary-percent 1.0
  --max-position-embeddings 8192 --norm-epsilon 1e-5
  --vocab-size 128256 --make-vocab-size-divisible-by 16032 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
