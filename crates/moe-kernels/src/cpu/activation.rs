//! Gated activations in f32.

use super::Kernel;
use super::math::{sigmoid, tanh};
use super::simd::{LANES, Lanes, Simd};
use crate::tags::Activation;

/// out = act(gate, up), rounded once.
pub(crate) struct Gated<'a, T> {
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub activation: Activation,
    pub out: &'a mut [T],
}

impl<T: Lanes> Kernel for Gated<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let inputs = self.gate.chunks(LANES).zip(self.up.chunks(LANES));
        for ((gate, up), out) in inputs.zip(self.out.chunks_mut(LANES)) {
            let gate = f32::load_some(s, gate);
            let up = f32::load_some(s, up);
            T::store_some(s, gated(s, self.activation, gate, up), out);
        }
    }
}

/// x = sigmoid(gate) * x, rounded once.
pub(crate) struct SigmoidGate<'a, T> {
    pub gate: &'a [f32],
    pub x: &'a mut [T],
}

impl<T: Lanes> Kernel for SigmoidGate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (gate, x) in self.gate.chunks(LANES).zip(self.x.chunks_mut(LANES)) {
            let scale = sigmoid(s, f32::load_some(s, gate));
            T::store_some(s, s.mul(T::load_some(s, x), scale), x);
        }
    }
}

/// The activation of gate and up values.
#[inline(always)]
pub(crate) fn gated<S: Simd>(s: S, activation: Activation, gate: S::V, up: S::V) -> S::V {
    match activation {
        Activation::SwiGlu => s.mul(s.mul(gate, sigmoid(s, gate)), up),
        Activation::Relu => s.mul(s.max(s.splat(0.0), gate), up),
        Activation::ClampedSwiGlu { limit } => {
            let (gate, up) = clamped(s, limit, gate, up);
            s.mul(s.mul(gate, sigmoid(s, gate)), up)
        }
        Activation::SwiGluOai { alpha, limit } => {
            let (gate, up) = clamped(s, limit, gate, up);
            let gate = s.mul(gate, sigmoid(s, s.mul(s.splat(alpha), gate)));
            s.mul(gate, s.add(up, s.splat(1.0)))
        }
        Activation::Gelu => {
            let scaled = s.mul(gate, s.splat(std::f32::consts::FRAC_1_SQRT_2));
            half_gate(s, gate, erf(s, scaled), up)
        }
        Activation::GeluTanh => {
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            let square = s.mul(gate, gate);
            let inner =
                s.mul(gate, s.fma(square, s.splat(0.044715 * SQRT_2_OVER_PI), s.splat(SQRT_2_OVER_PI)));
            half_gate(s, gate, tanh(s, inner), up)
        }
    }
}

/// min(gate, limit) and clamp(up, -limit, limit). NaN stays NaN.
#[inline(always)]
fn clamped<S: Simd>(s: S, limit: f32, gate: S::V, up: S::V) -> (S::V, S::V) {
    let limit = s.splat(limit);
    (s.min(limit, gate), s.max(s.sub(s.splat(0.0), limit), s.min(limit, up)))
}

/// gate / 2 * (1 + t) * up.
#[inline(always)]
fn half_gate<S: Simd>(s: S, gate: S::V, t: S::V, up: S::V) -> S::V {
    s.mul(s.mul(s.mul(gate, s.splat(0.5)), s.add(t, s.splat(1.0))), up)
}

/// The error function, lane by lane through the library: exactness matters more than speed
/// where 1 + erf cancels.
#[inline(always)]
fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let mut lanes = [0f32; LANES];
    s.store(x, &mut lanes);
    for x in &mut lanes {
        *x = candle_core::cpu::erf::erf_f32(*x);
    }
    s.load(&lanes)
}
