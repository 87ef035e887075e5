// Code that every kernel file shares: the launch, device limits, vector loads and warp reductions.
//
// Rules of a launcher `extern "C" int moe_xxx(args.., void* stream)`: it returns a cudaError_t (0 =
// launched), refuses sizes it cannot do with cudaErrorInvalidValue, allocates nothing and never
// synchronises, so that any launcher can be captured into a graph. Pointers are device pointers,
// 16-byte aligned; `stream` is a cudaStream_t.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace moe {

using bf16 = __nv_bfloat16;

/// topk_id of an absent expert: padding rows and masked slots.
constexpr uint32_t kNoExpert = 0xffffffffu;

template <class A, class B>
__host__ __device__ constexpr A ceil_div(A a, B b) {
  return (a + static_cast<A>(b) - 1) / static_cast<A>(b);
}

template <class A, class B>
__host__ __device__ constexpr A round_up(A a, B b) {
  return ceil_div(a, b) * static_cast<A>(b);
}

// ---- host: which code runs, limits and launch

/// Whether this file is also compiled to PTX, which a driver translates for cards without machine code in this build.
#ifdef MOE_PTX
constexpr bool kBuiltAsPtx = true;
#else
constexpr bool kBuiltAsPtx = false;
#endif

/// Whether only kernels that are built as PTX may run. Tests use it on cards with machine code. MOE_PTX_ONLY=1 launches
/// the machine code of these kernels. With the driver's CUDA_FORCE_PTX_JIT=1 the driver ignores all machine code and
/// translates their PTX.
inline bool ptx_only() {
  static const bool asked = [] {
    for (const char* name : {"MOE_PTX_ONLY", "CUDA_FORCE_PTX_JIT"}) {
      const char* value = std::getenv(name);
      if (value != nullptr && std::strcmp(value, "1") == 0) return true;
    }
    return false;
  }();
  return asked;
}

/// Major version of the architecture whose code runs on a card of this major version: the same one if there is machine
/// code for it, otherwise the earliest architecture, whose PTX the driver translates.
inline int code_major(int card) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  for (const int architecture : kArchitectures)
    if (architecture / 100 == card && !ptx_only()) return card;
  return kArchitectures[0] / 100;
}

struct DeviceLimits {
  int sms;         // SMs
  int block_smem;  // shared memory a block may opt in to, bytes
  int major;       // of the architecture whose code runs: 9 has clusters, bulk copies and warpgroup products
};

/// Limits of the current device.
inline cudaError_t device_limits(DeviceLimits* out) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&out->sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&out->block_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  int card = 0;
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&card, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) out->major = code_major(card);
  return e;
}

struct Launch {
  dim3 grid;
  dim3 block;
  void* stream;
  size_t smem = 0;           // dynamic shared memory, bytes
  bool overlap = true;       // start before the kernel ahead ends; the kernel then calls pdl_wait()
  bool cooperative = false;  // all blocks are resident at once, so they may wait for each other. Two such launches
                             // that shared the device, each with a part of its blocks, would wait for ever
  unsigned cluster = 1;      // blocks, along x, that share their shared memory (Hopper)
};

/// Launches `kernel`. The result is the error of this launch, never of an earlier call. kPtx separates the two kinds of
/// files, which may launch kernels with the same parameters.
template <bool kPtx = kBuiltAsPtx, class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const Launch& l, Args... args) {
  if (!kPtx && ptx_only()) return cudaErrorNoKernelImageForDevice;
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess && l.smem > 48 * 1024)
    e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(l.smem));
  // Asks for the largest shared memory that L1 allows. With a carve-out that just fits this kernel, blocks of the next
  // kernel could not start on the same SM.
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[4];
  unsigned count = 0;
  // Code for earlier cards has no pdl_wait, and without it an early start would be a race.
  if (l.overlap && code_major(major) >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (l.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (l.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = l.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
    // If blocks of a cluster are packed on one SM, they keep the next kernel's block out of it.
    attributes[count].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[count++].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = l.grid;
  config.blockDim = l.block;
  config.dynamicSmemBytes = l.smem;
  config.stream = static_cast<cudaStream_t>(l.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// ---- device: vectors

/// 16 bytes in registers.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

/// Loads 16 bytes that no kernel writes at the same time, through the read-only path.
__device__ __forceinline__ Vec16 load_const(const void* p) {
  const uint4 v = __ldg(static_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}

/// Like `load_const`, for data that is read once: it does not stay in L1.
__device__ __forceinline__ Vec16 load_stream(const void* p) {
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p));
  return v;
}

/// Both halves of a word of two bf16.
__device__ __forceinline__ float2 unpack_bf16(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// ---- device: reductions over a warp; every lane gets the result

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

/// Sum of the lanes before this one, and the total.
__device__ __forceinline__ uint32_t warp_exclusive_sum(uint32_t v, uint32_t* total) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t sum = v;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= static_cast<uint32_t>(step)) sum += other;
  }
  *total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - v;
}

}  // namespace moe
