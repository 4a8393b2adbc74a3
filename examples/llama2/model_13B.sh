# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Llama-2 13B
MODEL_NAME=llama2-13b
MODEL_ARGS=(
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824
  --num-attention-heads 40 --kv-channels 128
  --rotary-base 10000 --rotary-percent 1.0
  --max-position-embeddings 4096 --norm-epsilon 1e-5
  --vocab-size 32000 --make-vocab-size-divisible-by 4000 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
