#!/usr/bin/env bash
# Starts the server in a pod (config.yaml beside this file names it) or anywhere else:
#   MODEL_PATH=/data/models/qwen2-7b bash run_vllm.sh [further flags of the server]
set -euo pipefail

: "${MODEL_PATH:?set MODEL_PATH to the directory of the model}"
export ASCEND_RT_VISIBLE_DEVICES=${ASCEND_RT_VISIBLE_DEVICES:-0}
# lets the allocator grow its segments; set it to expandable_segments:False if virtual memory causes problems
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
# Models that need attention in high precision (docs/environment.md):
# export USE_PFA_HIGH_PRECISION_MODE=1 USE_IFA_HIGH_PRECISION_MODE=1 USE_PREFIX_HIGH_PRECISION_MODE=1

# exec: signals reach the server itself, so that a terminated pod shuts down properly
exec "${PYTHON:-python}" -m ascend_vllm.entrypoints.openai.api_server \
    --model "$MODEL_PATH" \
    --device "${DEVICE:-auto}" \
    --max-num-seqs "${MAX_NUM_SEQS:-256}" \
    --max-model-len "${MAX_MODEL_LEN:-4096}" \
    --max-num-batched-tokens "${MAX_NUM_BATCHED_TOKENS:-4096}" \
    --tensor-parallel-size "${TENSOR_PARALLEL_SIZE:-1}" \
    --block-size "${BLOCK_SIZE:-128}" \
    --gpu-memory-utilization "${GPU_MEMORY_UTILIZATION:-0.9}" \
    --num-scheduler-steps "${NUM_SCHEDULER_STEPS:-8}" \
    --host "${HOST:-0.0.0.0}" \
    --port "${PORT:-8080}" \
    "$@"
