# shellcheck shell=bash disable=SC2034 # the recipe reads it
# One layer of DeepSeek-V3 and its multi-token prediction: for a first run on one machine, not for a model.
MODEL_NAME=deepseek-v3-lite
MODEL_ARGS=(
  --num-layers 1 --hidden-size 7168 --ffn-hidden-size 2048
  --num-attention-heads 128 --multi-latent-attention --qk-layernorm
  --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --rotary-base 10000 --rotary-percent 1.0
  --rope-type yarn --rotary-scaling-factor 1
  --num-experts 256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq 1 --moe-grouped-gemm
  --moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-dtype fp32
  --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
  --max-position-embeddings 4096 --norm-epsilon 1e-6
  --vocab-size 129280 --make-vocab-size-divisible-by 3232 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
