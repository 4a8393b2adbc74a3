# shellcheck shell=bash
# A model of DeepSeek-V3's shape, small enough for a laptop: latent attention, a dense layer, a shared expert.

# shellcheck disable=SC2034 # the script that sources this uses them
MODEL_ARGS=(
  --num-layers 2
  --hidden-size 64
  --ffn-hidden-size 128
  --num-attention-heads 4
  --multi-latent-attention
  --q-lora-rank 32
  --kv-lora-rank 16
  --qk-head-dim 16
  --qk-pos-emb-head-dim 8
  --v-head-dim 16
  --qk-layernorm
  --rope-type rope
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --position-embedding-type rope
  --rotary-base 10000
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
  --vocab-size 64
  --make-vocab-size-divisible-by 1
  --num-experts 4
  --moe-ffn-hidden-size 32
  --moe-shared-expert-intermediate-size 32
  --moe-layer-freq "([0]*1+[1]*1)"
  --moe-router-topk 2
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-router-dtype fp32
  --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 0
  --moe-token-dispatcher-type alltoall
)
