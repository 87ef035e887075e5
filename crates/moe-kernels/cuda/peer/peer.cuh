// Words that are sent between the GPUs of a host: each rank has a buffer into which all ranks write over NVLink.
//
// A slot has 16 bytes, and each of its 32-bit words is its own flag: EMPTY (all ones) until a rank has stored data
// there. So a word needs one store and one load, no fence after the data, no flag with another round trip, and uses the
// full rate of the link (packets of data and flag carry half as much). This is the idea of Lamport's one-place buffers.
// All ones is a NaN in f32 and in both halves of two bf16; a sender replaces it by a different NaN, so no sum changes.
// Stores and loads are relaxed at system scope: the received word itself is the data, and no other data depends on it.
//
// A buffer has two halves, which calls use in turn. The receiver of a word empties its slot. Why this needs no barrier:
//   1. A call ends on rank r only after a word from each peer p that p sent in that call, or that a third rank sent in
//      that call after it had received one from p in that call.
//   2. p sends in call e + 1 only after its call e has ended (pdl_wait), so after it has received and emptied all that
//      was sent to it in call e.
//   3. r sends into the half of call e again in call e + 2, after its own call e + 1 has ended. By 1 and 2, p has
//      emptied its half by then. One half would not do: r may be done with call e while p has not yet received r's
//      words of it.
// A counter on the device selects the half, so replays of a graph alternate too. All ranks make the same calls in the
// same order, each on one stream. A call without elements launches nothing, on all ranks.
//
// Waiting is limited. After `limit` ns, or when the host has written to the status word, a thread stops waiting, the
// status word tells the host which rank is missing, and later calls wait for no rank. The results are then garbage.
#pragma once

#include <type_traits>

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

constexpr int kMaxRanks = 8;
constexpr uint32_t kEmpty = 0xffffffffu;
constexpr uint32_t kOtherNan = 0x7fff7fffu;   // also a NaN in f32 and in both halves of two bf16
constexpr size_t kControlBytes = 256;         // before the halves
constexpr uint32_t kPollsPerLook = 1u << 14;  // about 10 ms between looks at the clock and at the host's word
constexpr size_t kHopBytes = 512 * 1024;      // what a link carries in the time of another hop: 350 GB/s x 1.5 us
constexpr size_t kLongHalf = 16 << 20;        // half a buffer for calls of thousands of rows: both halves stay in L2

/// The ranks of a group with the addresses that are valid on this rank. moe-kernels' `cuda::PeerBuffers` uses the same
/// layout.
struct Peers {
  uint8_t* buffer[kMaxRanks];  // each rank's buffer of moe_peer_buffer_bytes
  uint32_t* status;   // in host memory: 0, 1 + the rank that did not come, or what the host wrote to end the waiting
  uint64_t limit;     // ns
  uint64_t capacity;  // largest number of bytes of a call
  int32_t rank;
  int32_t ranks;
};

/// The head of a rank's own buffer, which is read by one load.
struct alignas(8) PeerControl {
  uint32_t turns;   // high half: calls so far; low half: blocks of the current call that have begun
  uint32_t failed;  // whether a call has given up
};

/// One call.
struct Exchange {
  Peers peers;
  size_t half;       // bytes of half a buffer
  uint32_t vectors;  // of 16 bytes
  uint32_t chunk;    // vectors that each rank adds up for all; 0: every rank adds up all
};

/// Whether every rank sends everything to each other rank (one shot): (n - 1) B bytes out of and into each GPU. Adding
/// up shares and sending the sums to all (two shots) is 2 (n - 1) / n B bytes and one more hop.
inline bool one_shot(size_t bytes, size_t n) { return bytes * (n - 1) * (n - 2) <= kHopBytes * n; }

inline size_t half_bytes(size_t n, size_t capacity) {
  const size_t largest = n <= 2 ? capacity : kHopBytes * n / ((n - 1) * (n - 2));
  const size_t one = n * round_up(largest < capacity ? largest : capacity, 16);
  const size_t two = 2 * round_up(capacity, 16) + 16 * n;  // shares to add up, and all sums
  const size_t most = one > two ? one : two;
  return round_up(most > kLongHalf ? most : kLongHalf, 256);
}

inline bool is_group(const Peers& peers) {
  return peers.ranks >= 2 && peers.ranks <= kMaxRanks && peers.rank >= 0 && peers.rank < peers.ranks;
}

/// The sum of `bytes` bytes.
inline cudaError_t exchange(const Peers& peers, size_t bytes, Exchange* x) {
  if (!is_group(peers) || bytes > peers.capacity) return cudaErrorInvalidValue;
  x->peers = peers;
  x->half = half_bytes(peers.ranks, peers.capacity);
  x->vectors = static_cast<uint32_t>(ceil_div(bytes, 16));
  x->chunk = one_shot(bytes, peers.ranks) ? 0 : ceil_div(x->vectors, peers.ranks);
  return cudaSuccess;
}

/// A call in which each rank sends `slots` slots to each other one. Rank r's slots are r * slots .. of the receiver's
/// half.
inline cudaError_t exchange_slots(const Peers& peers, size_t slots, Exchange* x) {
  if (!is_group(peers)) return cudaErrorInvalidValue;
  const size_t half = half_bytes(peers.ranks, peers.capacity);
  if (slots > half / 16 / peers.ranks) return cudaErrorInvalidValue;
  *x = {peers, half, static_cast<uint32_t>(slots), 0};
  return cudaSuccess;
}

/// Calls `use` with the number of ranks for which a kernel is compiled, for `ranks` ranks. A kernel must not contain
/// code that it does not need: it is launched hundreds of times in a step, each time its instructions come from L2
/// again, and jumps over unused code are fetched one after the other.
template <class Use>
cudaError_t for_ranks(int ranks, Use use) {
  if (ranks <= 2) return use(std::integral_constant<int, 2>());
  if (ranks <= 4) return use(std::integral_constant<int, 4>());
  return use(std::integral_constant<int, kMaxRanks>());
}

/// Loads kernels before their first launch.
template <class... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaError_t e = cudaSuccess;
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...})
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, kernel);
  return e;
}

/// Loads the kernels of gather.cu, scatter.cu, share.cu, combine.cu and dispatch.cu, as moe_peer_buffer_init loads the
/// kernels of its own file.
cudaError_t load_gather_kernels();
cudaError_t load_scatter_kernels();
cudaError_t load_share_kernel();
cudaError_t load_combine_kernel();
cudaError_t load_dispatch_kernels();

// ---- slots

__device__ __forceinline__ Vec16 load_system(const void* p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_system_word(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_system_word(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_system(void* p, const Vec16& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

__device__ __forceinline__ uint64_t global_timer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

/// A thread's part of a call.
struct Turn {
  uint32_t half;
  uint32_t polls;  // unsuccessful polls so far
  uint64_t since;  // the time when polls began to take long; 0: they have not
  bool over;       // whether this thread no longer waits for any rank
};

__device__ __forceinline__ PeerControl* peer_control(const Peers& peers) {
  return reinterpret_cast<PeerControl*>(peers.buffer[peers.rank]);
}

/// Finds the half that this call uses, after pdl_wait(). Every thread reads the counter itself, so that the value is
/// there as soon as the first loads of data, and then calls `count_turn` once.
__device__ __forceinline__ Turn begin_turn(const Exchange& x) {
  const PeerControl* control = peer_control(x.peers);
  uint32_t turns, failed;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(turns), "=r"(failed) : "l"(control) : "memory");
  return {turns >> 16 & 1u, 0, 0, failed != 0};
}

/// Counts this block. The last block of a launch advances the count of calls, when all blocks have read it. All threads
/// of every block call it once, after their first sends, because other ranks wait for these.
__device__ __forceinline__ void count_turn(const Exchange& x, Turn& turn) {
  turn.over = __syncthreads_or(turn.over);  // all threads have read the counter after this
  if (threadIdx.x != 0) return;
  uint32_t* turns = &peer_control(x.peers)->turns;
  if ((atomicAdd(turns, 1u) & 0xffffu) == gridDim.x - 1) atomicAdd(turns, 0x10000u - gridDim.x);
}

/// A slot of the current half of a rank's buffer.
__device__ __forceinline__ uint8_t* slot(const Exchange& x, const Turn& turn, int rank, uint32_t index) {
  return x.peers.buffer[rank] + kControlBytes + turn.half * x.half + static_cast<size_t>(index) * 16;
}

/// Fills an empty slot.
__device__ __forceinline__ void send(uint8_t* slot, Vec16 v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v.word[i] = v.word[i] == kEmpty ? kOtherNan : v.word[i];
  store_system(slot, v);
}

/// Counts an unsuccessful poll for a word of `sender`; returns true if the thread must stop waiting.
__device__ __forceinline__ bool gives_up(const Exchange& x, Turn& turn, int sender) {
  if (turn.over || ++turn.polls % kPollsPerLook != 0) return turn.over;
  const uint64_t now = global_timer();
  if (turn.since == 0) turn.since = now;
  uint32_t* failed = &peer_control(x.peers)->failed;
  const bool told = load_system_word(failed) != 0 || load_system_word(x.peers.status) != 0;
  if (!told && now - turn.since <= x.peers.limit) return false;
  if (!told) store_system_word(x.peers.status, 1u + static_cast<uint32_t>(sender));
  store_system_word(failed, 1);
  turn.over = true;
  return true;
}

__device__ __forceinline__ bool is_full(const Vec16& v) {
  return v.word[0] != kEmpty && v.word[1] != kEmpty && v.word[2] != kEmpty && v.word[3] != kEmpty;
}

/// Waits for a slot that `sender` fills, and empties it. For long calls: after an unsuccessful poll there is a pause,
/// so that thousands of waiting threads leave L2 to the working threads.
__device__ __forceinline__ Vec16 take(const Exchange& x, Turn& turn, uint32_t index, int sender) {
  uint8_t* from = slot(x, turn, x.peers.rank, index);
  Vec16 v = load_system(from);
  while (!is_full(v) && !gives_up(x, turn, sender)) {
    __nanosleep(200);
    v = load_system(from);
  }
  store_system(from, {{kEmpty, kEmpty, kEmpty, kEmpty}});
  return v;
}

/// Waits for the slots index(i) of the i in `wanted`, which rank `sender` + i % kRanks fills, and empties them; with
/// `pauses` it pauses like `take`.
template <int kRanks, int kCount, class Index>
__device__ __forceinline__ void receive_at(const Exchange& x, Turn& turn, Vec16 (&v)[kCount], uint32_t wanted,
                                           int sender, Index index, bool pauses = false) {
  const int own = x.peers.rank;
  uint32_t missing = wanted;
  bool again = false;
  do {
    if (again && pauses) __nanosleep(200);
    again = true;
    // All loads are started before the first value is used.
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (missing >> i & 1u) v[i] = load_system(slot(x, turn, own, index(i)));
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_full(v[i])) missing &= ~(1u << i);
  } while (missing != 0 && !gives_up(x, turn, sender + (__ffs(missing) - 1) % kRanks));
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (wanted >> i & 1u) store_system(slot(x, turn, own, index(i)), {{kEmpty, kEmpty, kEmpty, kEmpty}});
}

/// receive_at for the slots base + r * stride.
template <int kCount>
__device__ __forceinline__ void receive(const Exchange& x, Turn& turn, Vec16 (&v)[kCount], uint32_t wanted, int sender,
                                        uint32_t base, uint32_t stride, bool pauses = false) {
  receive_at<kCount>(x, turn, v, wanted, sender, [=](int r) { return base + r * stride; }, pauses);
}

}  // namespace moe
