# shellcheck shell=bash
# The places of one site. Fill in, and source before a recipe: `source examples/rl/set_env.sh`.
# A variable that is set already stays.

export SLIME_PATH=${SLIME_PATH:-}       # checkout of slime
export MILES_PATH=${MILES_PATH:-}       # checkout of miles
export MEGATRON_PATH=${MEGATRON_PATH:-} # checkout of the Megatron-LM that it asks for
export HF_CHECKPOINT=${HF_CHECKPOINT:-} # the model, Hugging Face format
export REF_LOAD=${REF_LOAD:-}           # the model, torch_dist
export PROMPT_DATA=${PROMPT_DATA:-}     # prompts, JSON lines
export SAVE_DIR=${SAVE_DIR:-}           # checkpoints
