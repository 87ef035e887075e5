//! Dense products: which kernel multiplies a given number of rows.

use super::checks::{expect_at_most, expect_bf16, expect_rows, expect_steps};
use super::fp8::{expect_fp8_blas, expect_fp8_linear};
use super::quant::{QuantWeights, expect_floats, expect_quantised, kernel_name, row_pitch, takes_digits};
use super::{
    BULK_COPIES, ColumnOrder, DequantiseForm, Feature, Form, Gpu, LinearCall, Machine, Reason, Stage,
    TENSOR_CORES, WARPGROUPS,
};
use crate::fp8::Fp8Order;

/// The largest number of rows for which streaming the weights is faster than the tensor-core kernel (docs/kernels.md).
const STREAM_ROWS: usize = 4;
/// [`STREAM_ROWS`] for quantised weights.
const QUANT_STREAM_ROWS: usize = 8;
/// The largest number of rows for which a norm is computed in the launch of its product. The launch after the experts
/// could compute the norm instead, if it is only theirs. With 8 rows, half a layer of Qwen3-30B-A3B takes 1.7 us less
/// with separate launches (FP8, one H200).
const FUSED_ROWS: usize = 4;
/// From this many rows on cuBLAS is the fastest.
const BLAS_ROWS: usize = 65;
/// From this many rows on, cuBLAS is used although quantised weights must be converted to bf16 for it: qkv and o_proj
/// of Qwen3-30B-A3B take 44.0 us together at 384 rows and 35.6 by `linear_tensor`, 50.5 and 52.9 at 500 (int4, one
/// H200).
const QUANT_BLAS_ROWS: usize = 512;
/// From this many rows on products add to the residual stream.
const ADDING_ROWS: usize = 512;
/// cuBLASLt takes a number of FP8 rows that is a multiple of this.
pub(crate) const BLAS_FP8_ROWS: usize = 4;
/// The largest number of bytes of these bf16 weights between the launches.
const QUANT_BLAS_BYTES: usize = 256 << 20;
/// From this many weight rows on, a product is a vocabulary projection.
const WIDE: usize = 32 * 1024;
/// The longest rows of x for which [`STREAM_ROWS`] of them have room in shared memory next to the ring of weight
/// stages.
const STREAM_K: usize = 8192;
/// Bytes of shared memory that this kernel needs in addition to the rows of x, with one stage of weights, and the
/// padding at the end of each row. The kernel asserts the same numbers.
const STREAM_BYTES: usize = 8064 + 33_280;
const STREAM_PAD: usize = 64;
/// The smallest ring of the warpgroup products, with its barriers, in bytes.
const TENSOR_BYTES: usize = (112 << 10) + 256;
/// Elements along K that every fast kernel takes at a time.
const K_STEP: usize = 64;

/// The kernels of [`linear_into`](crate::linear_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearForm {
    /// cuBLAS.
    Blas,
    /// FP8 weights turned into rows, activations quantised, then cuBLASLt.
    Fp8Blas,
    /// FP8 weights, activations quantised (`fp8_linear`, wgmma).
    Fp8,
    /// Quantised weights turned into bf16, then cuBLAS.
    QuantBlas,
    /// Weights are streamed once for at most four rows (`linear_stream`).
    Stream,
    /// Warpgroup products (`linear_tensor`, wgmma).
    Tensor,
    /// Quantised weights of any scheme and shape, on CUDA.
    QuantAny,
    /// Any dtype and shape on CUDA.
    Any,
    /// The CPU.
    Cpu,
}

impl LinearForm {
    /// The order in which the product reads its `rows` rows if a launch before quantises them; `None`: it takes the
    /// model dtype, or quantises the rows itself.
    pub fn fp8_order(self, rows: usize) -> Option<Fp8Order> {
        match self {
            Self::Fp8 => Some(Fp8Order::Quads),
            // cuBLASLt takes only multiples of four rows; other numbers use another form.
            Self::Fp8Blas if rows.is_multiple_of(BLAS_FP8_ROWS) => Some(Fp8Order::Rows),
            _ => None,
        }
    }

    /// Whether this form needs rows of x in the order of the columns of `call`'s weights. A launch before it reorders
    /// them.
    pub(crate) fn orders_rows(self, call: &LinearCall) -> bool {
        let Some(quant) = call.quant.filter(|quant| quant.order == ColumnOrder::Sorted) else { return false };
        match self {
            Self::Stream | Self::Tensor => true,
            // The kernel for any scheme writes columns in the order of x.
            Self::QuantBlas => call.aligned && quant.expect_fast(call.n, call.k).is_ok(),
            _ => false,
        }
    }

    /// Whether the product of `rows` rows adds to the residual stream instead of storing its result. cuBLAS reads the
    /// stream during its products, and the norm that follows then need not add.
    ///
    /// # Errors
    /// The reason why not.
    pub fn adds(self, rows: usize) -> Result<(), Reason> {
        match self {
            Self::Blas | Self::Fp8Blas | Self::QuantBlas => expect_rows(ADDING_ROWS.., rows),
            _ => Err(Reason::NoGain("the norm after it adds in the same time")),
        }
    }
}

impl LinearCall {
    /// The conditions of every fast kernel: bf16, and sizes that it can cut into its steps.
    fn expect_bf16(&self) -> Result<(), Reason> {
        expect_bf16(self.dtype)?;
        match self.quant {
            None => expect_steps("k", self.k, K_STEP),
            Some(quant) => quant.expect_fast(self.n, self.k),
        }
    }

    /// The conditions of the kernels that stream weights for a few rows.
    fn expect_stream(&self, gpu: Gpu) -> Result<(), Reason> {
        self.expect_bf16()?;
        if self.quant.is_some_and(|quant| quant.gate_up) {
            return Err(Reason::Part { part: "gate and up rows in one pack" });
        }
        let most = if self.quant.is_some() { QUANT_STREAM_ROWS } else { STREAM_ROWS };
        expect_rows(..=most, self.rows)?;
        match self.quant {
            None => {
                expect_at_most("k", STREAM_K, self.k)?;
                gpu.expect_shared_memory(STREAM_BYTES + self.rows * (2 * self.k + STREAM_PAD))
            }
            Some(quant) => self.expect_quant_stream(quant, gpu),
        }
    }

    /// Rows of x are next to rings of weights in a block's shared memory: `layout` of `quant_linear_stream`.
    pub(crate) fn expect_quant_stream(&self, quant: QuantWeights, gpu: Gpu) -> Result<(), Reason> {
        const WARPS: usize = 16; // each of which owns every 16th step along K
        const COLUMNS: usize = 128; // of a step
        const SUMS: usize = 3 * 16; // rows of tiles whose sums are added together
        const SIDE: usize = 192; // bytes of a step's scales and zero points
        let (step, depth) = if quant.scheme.bits() == 4 { (1024, 4) } else { (2048, 3) };
        let own = self.k.div_ceil(COLUMNS).div_ceil(WARPS) * COLUMNS;
        let pitch = row_pitch(own, self.rows == 1 && takes_digits(quant.scheme));
        let needs = WARPS * (depth * (step + SIDE) + self.rows * (pitch + 4 * SUMS + 4));
        gpu.expect_shared_memory(needs)
    }

    fn expect_aligned(&self) -> Result<(), Reason> {
        if self.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}

impl Form for LinearForm {
    type Call = LinearCall;

    const ALL: &'static [Self] = &[
        Self::Blas,
        Self::Fp8Blas,
        Self::Fp8,
        Self::QuantBlas,
        Self::Stream,
        Self::Tensor,
        Self::QuantAny,
        Self::Any,
        Self::Cpu,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Blas => "cublas",
            Self::Fp8Blas => "fp8_rows + cublasLt (W8A8: activations are quantised)",
            Self::Fp8 => "fp8_linear (W8A8: activations are quantised)",
            Self::QuantBlas => "dequantise + cublas",
            Self::Stream => "linear_stream",
            Self::Tensor => "linear_tensor",
            Self::QuantAny => "any_quant_linear",
            Self::Any => "any_linear",
            Self::Cpu => "cpu_linear",
        }
    }

    fn kernel(self, call: &LinearCall) -> String {
        if let (Self::QuantBlas, Some(quant)) = (self, call.quant) {
            let (order, dequantise) = match self.orders_rows(call) {
                true => ("order_rows + ", DequantiseForm::Fast),
                false => ("", DequantiseForm::for_blas(call.n, call.k, quant)),
            };
            return format!("{order}{} + cublas", dequantise.name());
        }
        let has_form = matches!(self, Self::Stream | Self::Tensor);
        kernel_name(self.name(), call.quant.filter(|_| has_form))
    }

    fn fits(self, call: &LinearCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::Blas => {
                machine.expect_library()?;
                expect_floats(call.quant)?;
                call.expect_bf16()?;
                machine.expect_batch_variant()?;
                if call.bias {
                    return Err(Reason::Bias);
                }
                expect_rows(BLAS_ROWS.., call.rows)
            }
            Self::Fp8Blas => expect_fp8_blas(call, machine),
            Self::Fp8 => expect_fp8_linear(call, machine),
            Self::QuantBlas => {
                machine.expect_library()?;
                expect_quantised(call.quant)?;
                expect_bf16(call.dtype)?;
                machine.expect_batch_variant()?;
                if call.bias {
                    return Err(Reason::Bias);
                }
                expect_rows(QUANT_BLAS_ROWS.., call.rows)?;
                match call.n.saturating_mul(call.k).saturating_mul(2) {
                    needs if needs <= QUANT_BLAS_BYTES => Ok(()),
                    needs => Err(Reason::Memory { needs, has: QUANT_BLAS_BYTES }),
                }
            }
            Self::Stream => {
                let gpu = machine.expect_tuned(TENSOR_CORES)?;
                if call.quant.is_some() {
                    machine.expect_tuned(BULK_COPIES)?;
                }
                machine.expect_batch_variant()?;
                call.expect_stream(gpu)?;
                // Warpgroup products are faster there.
                if gpu.has(Feature::Wgmma) && call.quant.is_none() {
                    expect_at_most("n", WIDE - 1, call.n)?;
                }
                call.expect_aligned()
            }
            Self::Tensor => {
                machine.expect_tuned(WARPGROUPS)?.expect_shared_memory(TENSOR_BYTES)?;
                call.expect_bf16()?;
                call.expect_aligned()
            }
            Self::QuantAny => {
                machine.expect_gpu()?;
                expect_quantised(call.quant).map(drop)
            }
            Self::Any => machine.expect_gpu().map(drop),
            Self::Cpu => machine.expect_cpu(),
        }
    }
}

/// The kernels of [`norm_linear_into`](crate::norm_linear_into) and [`linear_add_into`](crate::linear_add_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FusedLinearForm {
    /// Norm or addition inside the launch of the product (`linear_stream`).
    Stream,
    /// A separate launch for each.
    Apart,
}

impl Form for FusedLinearForm {
    type Call = LinearCall;

    const ALL: &'static [Self] = &[Self::Stream, Self::Apart];

    fn name(self) -> &'static str {
        match self {
            Self::Stream => "linear_stream",
            Self::Apart => "apart",
        }
    }

    fn kernel(self, call: &LinearCall) -> String {
        kernel_name(self.name(), call.quant.filter(|_| self == Self::Stream))
    }

    fn fits(self, call: &LinearCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Apart {
            return Ok(());
        }
        let gpu = machine.expect_tuned(BULK_COPIES)?;
        machine.expect_batch_variant()?;
        call.expect_stream(gpu)?;
        call.quant.map_or(Ok(()), |quant| quant.expect_order_of_x())?;
        expect_rows(..=FUSED_ROWS, call.rows)?;
        call.expect_aligned()
    }
}

impl FusedLinearForm {
    /// What [`linear_add_into`](crate::linear_add_into) launches: `product` and `sum` say what the product and the
    /// addition compute, `both` what a product with the addition computes.
    pub fn added(
        [product, sum, both]: [&'static [&'static str]; 3],
        call: &LinearCall,
        machine: &Machine,
    ) -> Vec<Stage> {
        let fused = Self::stage(both, call, machine);
        if Self::Stream.fits(call, machine).is_ok() {
            return vec![fused];
        }
        match LinearForm::choose(call, machine) {
            Some(form) if form.adds(call.rows).is_ok() => vec![LinearForm::stage(both, call, machine)],
            _ => vec![LinearForm::stage(product, call, machine), Stage::new(sum, "add")],
        }
    }
}

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
