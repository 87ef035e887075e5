//! bf16 SwiGLU experts on CUDA: which kernels compute a step's slots.

use super::checks::{expect_at_most, expect_rows, expect_steps};
use super::fp8::expect_fp8_products;
use super::one_launch::{ONE_LAUNCH_EXPERTS, ONE_LAUNCH_LOCAL, ONE_LAUNCH_SLOTS, ONE_LAUNCH_TOKENS};
use super::quant::{QuantWeights, expect_floats, expect_quantised, kernel_name};
use super::{
    BULK_COPIES, ColumnOrder, ExpertsCall, Form, Machine, Reason, TENSOR_CORES, WARPGROUPS, activation_kind,
};

/// The launches that bring experts from host memory.
pub const EXPERTS_FROM_HOST: &str = "expert_residency, expert_exchange";
/// From this many tokens on, warpgroup products are faster than the streaming kernel (docs/kernels.md).
const TENSOR_TOKENS: usize = 8;
/// [`TENSOR_TOKENS`] for quantised weights.
const QUANT_TENSOR_TOKENS: usize = 5;
/// Most experts of the warpgroup products, whose table of experts is in shared memory.
const TENSOR_EXPERTS: usize = 2048;
/// From this many rows per expert on, on average, warpgroup products are computed in tiles of up to 256 rows.
const WIDE_ROWS: usize = 32;
/// [`WIDE_ROWS`] for quantised weights.
const QUANT_WIDE_ROWS: usize = 64;
/// [`WIDE_ROWS`] for FP8 weights whose activations may become FP8.
const FP8_ROWS: usize = 32;
/// Most experts of the products in tiles of up to 256 rows, whose table is next to a longer ring.
const WIDE_EXPERTS: usize = 1024;
/// Below this many tokens, the streaming kernel is faster than the grouped kernels of other cards.
const GROUPED_TOKENS: usize = 256;
/// Most slots of the streaming kernel.
const STREAM_SLOTS: usize = 2048;
/// Bytes of shared memory that the kernels use: `.._RING` for the ring of weight stages and everything else that does
/// not depend on the number of experts, `.._ENTRY` for each expert in the table. The kernels assert or name the same
/// numbers.
const TENSOR_RING: usize = 200 << 10;
const TENSOR_ENTRY: usize = 8;
const WIDE_RING: usize = 212_992;
const WIDE_ENTRY: usize = 16;
const GROUPED_BYTES: usize = 98_304;

impl ExpertsCall {
    /// Slots T K.
    pub fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Whether `moe_layer_stream` computes these sizes in one launch, with the router inside or from given ids.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_one_launch(&self, machine: &Machine) -> Result<(), Reason> {
        let gpu = machine.expect_tuned(BULK_COPIES)?;
        machine.expect_batch_variant()?;
        self.expect_one_pass()?;
        expect_rows(..=ONE_LAUNCH_TOKENS, self.tokens)?;
        self.expect_local()?;
        self.expect_weights()?;
        self.expect_biased()?;
        self.expect_order_of_x()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of slots", ONE_LAUNCH_SLOTS, self.slots())?;
        expect_at_most("num_experts", ONE_LAUNCH_EXPERTS, self.num_ids)?;
        expect_at_most("number of local experts", ONE_LAUNCH_LOCAL, self.num_local)?;
        expect_at_most("top_k", self.num_ids.min(ONE_LAUNCH_SLOTS), self.top_k)?;
        self.expect_shared_memory(gpu)
    }

    /// Whether the warpgroup products compute these sizes.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_tensor(&self, machine: &Machine) -> Result<(), Reason> {
        let gpu = machine.expect_tuned(WARPGROUPS)?;
        if !machine.batch_invariant && self.passes == 1 {
            let least = match self.quant {
                None => TENSOR_TOKENS,
                // No faster kernel takes rows in an order that differs between experts.
                Some([QuantWeights { order: ColumnOrder::Sorted, .. }, _]) => 1,
                Some(_) => QUANT_TENSOR_TOKENS,
            };
            expect_rows(least.., self.tokens)?;
        }
        self.expect_local()?;
        self.expect_weights()?;
        self.expect_biased()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of local experts", TENSOR_EXPERTS, self.num_local)?;
        gpu.expect_shared_memory(self.header_bytes(TENSOR_ENTRY) + TENSOR_RING)
    }

    /// Whether the warpgroup products for prompts compute these sizes. Their slot rows are rounded to bf16, so a row's
    /// bits are not the same as with the products for fewer rows.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_wide(&self, machine: &Machine) -> Result<(), Reason> {
        let gpu = machine.expect_tuned(WARPGROUPS)?;
        machine.expect_batch_variant()?;
        let rows = if self.quant.is_some() { QUANT_WIDE_ROWS } else { WIDE_ROWS };
        expect_rows((rows * self.num_ids).div_ceil(self.top_k.max(1)).., self.tokens)?;
        self.expect_local()?;
        self.expect_weights()?;
        self.expect_biased()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of local experts", WIDE_EXPERTS, self.num_local)?;
        gpu.expect_shared_memory(self.header_bytes(WIDE_ENTRY) + WIDE_RING)
    }

    /// Bytes of the barriers and of the table of experts that a step touches, with `entry` bytes each, in the products
    /// over lists of slots.
    fn header_bytes(&self, entry: usize) -> usize {
        (1024 + (self.slots().min(self.num_local) + 1) * entry).next_multiple_of(1024)
    }

    /// Whether the products of FP8 weights with activations in FP8 compute these sizes. Slot rows are rounded as in
    /// [`fits_wide`](Self::fits_wide).
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_fp8(&self, machine: &Machine) -> Result<(), Reason> {
        let [w13, w2] = self.quant.map_or([None; 2], |packs| packs.map(Some));
        expect_fp8_products(&[(w13, 2 * self.inter, self.hidden), (w2, self.hidden, self.inter)], machine)?;
        self.expect_one_pass()?;
        self.expect_plain()?;
        expect_rows((FP8_ROWS * self.num_ids).div_ceil(self.top_k.max(1)).., self.tokens)?;
        self.expect_local()?;
        expect_at_most("number of local experts", WIDE_EXPERTS, self.num_local)
    }

    /// Fails for quantised weights that the fast kernels do not read.
    fn expect_weights(&self) -> Result<(), Reason> {
        let Some([w13, w2]) = self.quant else { return Ok(()) };
        w13.expect_fast(2 * self.inter, self.hidden)?;
        w2.expect_fast(self.hidden, self.inter)?;
        // The columns of activations are in the order of w13's rows. If w2's columns are sorted, w13's rows are sorted
        // in the same way when they are loaded.
        w2.expect_order_of_x()?;
        if w13.has_codec_of(&w2) { Ok(()) } else { Err(Reason::Quant { got: w2.scheme }) }
    }

    /// Fails for biases, and for activations of other names.
    fn expect_epilogue(&self, bias: bool, activations: &[&'static str]) -> Result<(), Reason> {
        let got = self.epilogue.activation;
        if !activations.contains(&activation_kind(got)) {
            return Err(Reason::Activation { got, accepted: activations.to_vec() });
        }
        if self.epilogue.bias && !bias { Err(Reason::Bias) } else { Ok(()) }
    }

    /// Fails unless the experts are SwiGLU experts without biases.
    fn expect_plain(&self) -> Result<(), Reason> {
        self.expect_epilogue(false, &["swiglu"])
    }

    /// Fails for what the kernels with biases do not compute.
    fn expect_biased(&self) -> Result<(), Reason> {
        self.expect_epilogue(true, &["swiglu", "swiglu_oai"])
    }

    /// Fails if each expert has its own order of columns: the kernel reads each row once for all experts.
    fn expect_order_of_x(&self) -> Result<(), Reason> {
        self.quant.map_or(Ok(()), |[w13, _]| w13.expect_order_of_x())
    }

    /// Whether the kernels of this step can leave its slots' rows, [T, K, H] f32, to a caller that adds them.
    pub fn leaves_slots(&self, machine: &Machine) -> bool {
        self.passes == 1 && ExpertsForm::choose(self, machine) == Some(ExpertsForm::Tensor)
    }

    fn expect_one_pass(&self) -> Result<(), Reason> {
        if self.passes <= 1 { Ok(()) } else { Err(Reason::Passes { passes: self.passes }) }
    }

    fn expect_local(&self) -> Result<(), Reason> {
        if self.num_local > 0 { Ok(()) } else { Err(Reason::NoLocalExperts) }
    }
}

/// The kernels of the fused experts (`cuda_fused`) for given ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpertsForm {
    /// Both products and the sum in one launch for a few tokens (`layer_stream`).
    OneLaunch,
    /// FP8 weights with activations that become FP8, too, over lists of slots, then the sum (`fp8_experts`).
    Fp8,
    /// Warpgroup products in tiles of up to 256 rows over lists of slots, then the sum (`experts_wide`).
    Wide,
    /// [`Wide`](Self::Wide) in tiles of up to 128 rows, for fewer rows (`experts_tensor`).
    Tensor,
    /// Weights are streamed once for the slots of each expert, and the sum is in the same launch (`experts_stream`).
    Stream,
    /// Tiles of sorted slots on the tensor cores of any card, then the sum (`experts_grouped`).
    Grouped,
    /// Quantised weights of any scheme on any card: sorted slots, both products and the sum, a launch each.
    QuantAny,
}

impl Form for ExpertsForm {
    type Call = ExpertsCall;

    const ALL: &'static [Self] =
        &[Self::OneLaunch, Self::Fp8, Self::Wide, Self::Tensor, Self::Stream, Self::Grouped, Self::QuantAny];

    fn name(self) -> &'static str {
        match self {
            Self::OneLaunch => "layer_stream",
            Self::Fp8 => "fp8_experts (W8A8: activations are quantised)",
            Self::Wide => "experts_wide",
            Self::Tensor => "experts_tensor",
            Self::Stream => "experts_stream",
            Self::Grouped => "experts_grouped",
            Self::QuantAny => "any_quant_experts",
        }
    }

    fn kernel(self, call: &ExpertsCall) -> String {
        let has_form = !matches!(self, Self::Fp8 | Self::Grouped | Self::QuantAny);
        kernel_name(self.name(), call.quant.filter(|_| has_form).map(|[w13, _]| w13))
    }

    fn fits(self, call: &ExpertsCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::OneLaunch => call.fits_one_launch(machine),
            Self::Fp8 => call.fits_fp8(machine),
            Self::Wide => call.fits_wide(machine),
            Self::Tensor => call.fits_tensor(machine),
            Self::Stream => {
                machine.expect_tuned(TENSOR_CORES)?;
                if call.quant.is_some() {
                    machine.expect_tuned(BULK_COPIES)?;
                    call.expect_weights()?;
                    call.expect_order_of_x()?;
                }
                machine.expect_batch_variant()?;
                call.expect_one_pass()?;
                call.expect_biased()?;
                expect_rows(..GROUPED_TOKENS, call.tokens)?;
                expect_at_most("number of slots", STREAM_SLOTS, call.slots())
            }
            Self::Grouped => {
                machine.expect_tuned(TENSOR_CORES)?.expect_shared_memory(GROUPED_BYTES)?;
                call.expect_one_pass()?;
                call.expect_plain()?;
                expect_floats(call.quant.map(|[w13, _]| w13))
            }
            Self::QuantAny => {
                // The kernels before and after the products, which sort slots and add, are tuned ones.
                machine.expect_tuned(&[])?;
                call.expect_one_pass()?;
                call.expect_biased()?;
                expect_quantised(call.quant.map(|[w13, _]| w13)).map(drop)
            }
        }
    }
}

#[cfg(test)]
#[path = "experts_tests.rs"]
mod tests;
