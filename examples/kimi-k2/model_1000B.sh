# shellcheck shell=bash disable=SC2034 # the recipe reads it
# Kimi-K2. Megatron has no flag for the two ends of YaRN's ramp, which Kimi-K2 sets to 1; ours set them.
MODEL_NAME=kimi-k2
MODEL_ARGS=(
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
  --num-attention-heads 64 --multi-latent-attention --qk-layernorm
  --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --rotary-base 50000 --rotary-percent 1.0
  --rope-type yarn --rotary-scaling-factor 32 --mscale 1.0 --mscale-all-dim 1.0
  --musa-yarn-beta-fast 1 --musa-yarn-beta-slow 1
  --num-experts 384 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq '([0]*1+[1]*60)' --moe-grouped-gemm
  --moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-dtype fp32
  --moe-router-topk-scaling-factor 2.827 --moe-router-num-groups 1 --moe-router-group-topk 1
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
  --max-position-embeddings 131072 --norm-epsilon 1e-6
  --vocab-size 163840 --make-vocab-size-divisible-by 1280 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
