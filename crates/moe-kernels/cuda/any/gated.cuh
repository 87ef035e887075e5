// Gated activations, in f32.
#pragma once

namespace moe {

enum class Activation : int { kSwiGlu = 0, kSwiGluOai = 1, kGelu = 2, kGeluTanh = 3 };

/// A gated activation; alpha and limit are gpt-oss's.
struct Gated {
  Activation kind;
  float alpha, limit;

  __device__ __forceinline__ float operator()(float gate, float up) const {
    switch (kind) {
      case Activation::kSwiGlu: return gate / (1.f + expf(-gate)) * up;
      case Activation::kSwiGluOai: {
        gate = fminf(gate, limit);
        up = fmaxf(-limit, fminf(up, limit));
        return gate / (1.f + expf(-alpha * gate)) * (up + 1.f);
      }
      case Activation::kGelu: return gate * 0.5f * (1.f + erff(gate * 0.70710678f)) * up;
      default: {
        const float inner = 0.7978846f * gate * (1.f + 0.044715f * gate * gate);
        return gate * 0.5f * (1.f + tanhf(inner)) * up;
      }
    }
  }
};

}  // namespace moe
