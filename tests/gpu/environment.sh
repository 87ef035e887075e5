# Sourced by the scripts beside it: the unpacked folder, and where NCCL is if it came by pip.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nccl=$(python3 -c 'import nvidia.nccl; print(*nvidia.nccl.__path__)' 2>/dev/null) &&
  export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Multicast over NVLink needs a fabric manager that containers often cannot reach.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
