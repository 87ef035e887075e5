// Tells the choice of kernels on the host whether only kernels that are built as PTX may run.
#include "ptx/common.cuh"

/// 1 or 0.
extern "C" int moe_ptx_only() { return moe::ptx_only() ? 1 : 0; }
