# The scripts in this folder source this file. It sets the unpacked folder, and the folder of NCCL if pip installed it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nccl=$(python3 -c 'import nvidia.nccl; print(*nvidia.nccl.__path__)' 2>/dev/null) &&
  export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Multicast over NVLink needs a fabric manager that containers often cannot reach.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
