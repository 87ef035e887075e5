//! Matches on dtypes, and the operations that kernels need on floats.

use half::{bf16, f16};

use crate::storage::Element;

/// A float type of weights and activations. Every kernel accumulates in f32.
pub trait Float: Element + candle_core::WithDType {
    /// Exact widening.
    fn widen(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// A match on a dtype, with the type `$t` bound in the arm of each listed one.
#[doc(hidden)]
#[macro_export]
macro_rules! match_types {
    ($dtype:expr, $t:ident => $body:expr, [$($variant:ident $type:ty),*], $other:ident => $else:expr) => {
        match $dtype {
            $($crate::candle::DType::$variant => {
                type $t = $type;
                $body
            })*
            $other => $else,
        }
    };
}

/// Runs `$body` with the type `$t` bound to the Rust type of any dtype that views hold; any other
/// dtype is an error that names the op.
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $op:expr, $t:ident => $body:expr) => {
        $crate::match_types!($dtype, $t => $body, [U8 u8, U32 u32, I32 i32, I64 i64],
            dtype => $crate::with_float!(dtype, $op, $t => $body))
    };
}

/// Runs `$body` with the type `$t` bound to the Rust type of a float dtype (f32, bf16, f16);
/// any other dtype is an error that names the op.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $op:expr, $t:ident => $body:expr) => {
        $crate::match_types!($dtype, $t => $body, [F32 f32, BF16 $crate::half::bf16, F16 $crate::half::f16],
            other => Err($crate::candle::Error::Msg(format!(
                "{}: expected dtype f32, bf16 or f16, got {}",
                $op,
                other.as_str()
            ))
            .bt()))
    };
}
