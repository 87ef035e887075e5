//! bf16 SwiGLU experts on CUDA: which kernels compute a step's slots.

use super::fp8::expect_fp8_products;
use super::linear::{expect_at_most, expect_rows, expect_steps};
use super::one_launch::{ONE_LAUNCH_EXPERTS, ONE_LAUNCH_LOCAL, ONE_LAUNCH_SLOTS, ONE_LAUNCH_TOKENS};
use super::quant::{QuantWeights, expect_floats, expect_quantised, kernel_name};
use super::{Form, Machine, Reason};
use crate::scheme::QuantScheme;

/// From this many tokens on Hopper's warpgroup products beat the streaming kernel (docs/kernels.md).
const TENSOR_TOKENS: usize = 8;
/// The same of quantised weights.
const QUANT_TENSOR_TOKENS: usize = 5;
/// Most experts of those products, whose table lies in shared memory.
const TENSOR_EXPERTS: usize = 2048;
/// From this many rows per expert on, on average, those products are computed in tiles of up to 256 rows.
const WIDE_ROWS: usize = 32;
/// The same of quantised weights.
const QUANT_WIDE_ROWS: usize = 64;
/// The same of FP8 weights whose activations may become FP8.
const FP8_ROWS: usize = 32;
/// Most experts of these, whose table lies beside a longer ring.
const WIDE_EXPERTS: usize = 1024;
/// Before this many tokens the streaming kernel beats the grouped kernels of other cards.
const GROUPED_TOKENS: usize = 256;
/// Most slots of the streaming kernel.
const STREAM_SLOTS: usize = 2048;

/// Sizes of an expert layer's step on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsCall {
    /// Tokens T.
    pub tokens: usize,
    /// Slots per token K.
    pub top_k: usize,
    /// Physical experts that ids name.
    pub num_ids: usize,
    /// Experts on this rank.
    pub num_local: usize,
    /// Width of a row, H.
    pub hidden: usize,
    /// Intermediate size on this rank, I.
    pub inter: usize,
    /// How w13 and w2 are quantised; `None`: they are bf16.
    pub quant: Option<[QuantWeights; 2]>,
}

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
        let gpu = machine.expect_hopper()?;
        machine.expect_batch_variant()?;
        expect_rows(..=ONE_LAUNCH_TOKENS, self.tokens)?;
        self.expect_local()?;
        self.expect_weights()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of slots", ONE_LAUNCH_SLOTS, self.slots())?;
        expect_at_most("num_experts", ONE_LAUNCH_EXPERTS, self.num_ids)?;
        expect_at_most("number of local experts", ONE_LAUNCH_LOCAL, self.num_local)?;
        expect_at_most("top_k", self.num_ids.min(ONE_LAUNCH_SLOTS), self.top_k)?;
        self.expect_shared_memory(gpu)
    }

    /// Whether the warpgroup products of Hopper compute these sizes.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_tensor(&self, machine: &Machine) -> Result<(), Reason> {
        machine.expect_hopper()?;
        if !machine.batch_invariant {
            let least = if self.quant.is_some() { QUANT_TENSOR_TOKENS } else { TENSOR_TOKENS };
            expect_rows(least.., self.tokens)?;
        }
        self.expect_local()?;
        self.expect_weights()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of local experts", TENSOR_EXPERTS, self.num_local)
    }

    /// Whether the warpgroup products for prompts compute these sizes. Their slot rows are rounded to bf16, so a row's
    /// bits are others than those of the products for fewer rows.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_wide(&self, machine: &Machine) -> Result<(), Reason> {
        machine.expect_hopper()?;
        machine.expect_batch_variant()?;
        let rows = if self.quant.is_some() { QUANT_WIDE_ROWS } else { WIDE_ROWS };
        expect_rows((rows * self.num_ids).div_ceil(self.top_k.max(1)).., self.tokens)?;
        self.expect_local()?;
        self.expect_weights()?;
        expect_steps("hidden_size", self.hidden, 64)?;
        expect_steps("intermediate_size", self.inter, 64)?;
        expect_at_most("number of local experts", WIDE_EXPERTS, self.num_local)
    }

    /// Whether the products of FP8 weights with activations in FP8 compute these sizes. Slot rows are as those of
    /// [`fits_wide`](Self::fits_wide).
    ///
    /// # Errors
    /// The first reason why not.
    pub fn fits_fp8(&self, machine: &Machine) -> Result<(), Reason> {
        let [w13, w2] = self.quant.map_or([None; 2], |packs| packs.map(Some));
        expect_fp8_products(&[(w13, 2 * self.inter, self.hidden), (w2, self.hidden, self.inter)], machine)?;
        expect_rows((FP8_ROWS * self.num_ids).div_ceil(self.top_k.max(1)).., self.tokens)?;
        self.expect_local()?;
        expect_at_most("number of local experts", WIDE_EXPERTS, self.num_local)
    }

    /// Fails for quantised weights that the fast kernels do not read.
    fn expect_weights(&self) -> Result<(), Reason> {
        let Some([w13, w2]) = self.quant else { return Ok(()) };
        w13.expect_fast(2 * self.inter, self.hidden)?;
        w2.expect_fast(self.hidden, self.inter)?;
        let format = |quant: QuantWeights| match quant.scheme {
            QuantScheme::Int { bits, .. } => bits,
            _ => 0,
        };
        if format(w13) == format(w2) { Ok(()) } else { Err(Reason::Quant { got: w2.scheme }) }
    }

    fn expect_local(&self) -> Result<(), Reason> {
        if self.num_local > 0 { Ok(()) } else { Err(Reason::NoLocalExperts) }
    }
}

/// The kernels of the fused experts (`cuda_fused`) for ids that are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsForm {
    /// Both products and the sum in one launch for a few tokens on Hopper (`layer_stream`).
    OneLaunch,
    /// FP8 weights with activations that become FP8, too, over lists of slots, then the sum (`fp8_experts`).
    Fp8,
    /// Warpgroup products of Hopper in tiles of up to 256 rows over lists of slots, then the sum (`experts_wide`).
    Wide,
    /// The same in tiles of up to 128 rows, for fewer rows (`experts_tensor`).
    Tensor,
    /// Weights stream past the slots of each expert, with the sum (`experts_stream`).
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
        kernel_name(self.name(), has_form && call.quant.is_some())
    }

    fn fits(self, call: &ExpertsCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::OneLaunch => call.fits_one_launch(machine),
            Self::Fp8 => call.fits_fp8(machine),
            Self::Wide => call.fits_wide(machine),
            Self::Tensor => call.fits_tensor(machine),
            Self::Stream => {
                machine.expect_gpu()?;
                if call.quant.is_some() {
                    machine.expect_hopper()?;
                    call.expect_weights()?;
                }
                machine.expect_batch_variant()?;
                expect_rows(..GROUPED_TOKENS, call.tokens)?;
                expect_at_most("number of slots", STREAM_SLOTS, call.slots())
            }
            Self::Grouped => {
                machine.expect_gpu()?;
                expect_floats(call.quant.map(|[w13, _]| w13))
            }
            Self::QuantAny => {
                machine.expect_gpu()?;
                expect_quantised(call.quant.map(|[w13, _]| w13)).map(drop)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::plan::Gpu;
    use crate::scheme::{Fp8Scales, QuantGroup};

    const QWEN3_30B: ExpertsCall = ExpertsCall {
        tokens: 1,
        top_k: 8,
        num_ids: 128,
        num_local: 128,
        hidden: 2048,
        inter: 768,
        quant: None,
    };

    fn hopper() -> Machine {
        Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() }
    }

    #[test]
    fn rows_choose_the_kernel() {
        let form = |tokens, machine: &Machine| {
            ExpertsForm::choose(&ExpertsCall { tokens, ..QWEN3_30B }, machine).map(Form::name)
        };
        for (tokens, kernel) in [
            (1, "layer_stream"),
            (4, "layer_stream"),
            (5, "experts_stream"),
            (8, "experts_tensor"),
            (511, "experts_tensor"),
            (512, "experts_wide"),
            (9000, "experts_wide"),
        ] {
            assert_eq!(form(tokens, &hopper()), Some(kernel), "{tokens} tokens");
        }
        let invariant = Machine { batch_invariant: true, ..hopper() };
        assert_eq!(
            (form(1, &invariant), form(9000, &invariant)),
            (Some("experts_tensor"), Some("experts_tensor"))
        );
        let ampere = Gpu { compute_capability: (8, 0), ..Gpu::HOPPER };
        let ampere = Machine { gpu: Some(ampere), ..Machine::default() };
        assert_eq!((form(4, &ampere), form(256, &ampere)), (Some("experts_stream"), Some("experts_grouped")));
        assert_eq!(form(4, &Machine::default()), None);
    }

    #[test]
    fn what_keeps_prompts_from_wide_tiles_is_said() {
        let fits = |call: ExpertsCall| call.fits_wide(&hopper()).map_err(|reason| reason.to_string());
        let prompt = ExpertsCall { tokens: 512, ..QWEN3_30B };
        assert_eq!(fits(prompt), Ok(()));
        // A rank that has a part of the experts gets its part of the slots.
        assert_eq!(fits(ExpertsCall { num_local: 16, ..prompt }), Ok(()));
        let refused = |call, why: &str| assert_eq!(fits(call), Err(why.to_string()));
        refused(ExpertsCall { tokens: 511, ..prompt }, "computes at least 512 rows at once, got 511");
        refused(ExpertsCall { num_ids: 129, ..prompt }, "computes at least 516 rows at once, got 512");
        refused(ExpertsCall { num_local: 0, ..prompt }, "needs an expert on this rank, but it has none");
        refused(
            ExpertsCall { inter: 96, ..prompt },
            "needs a intermediate_size that is a multiple of 64, got 96",
        );
        let many = ExpertsCall { tokens: 9000, num_ids: 2000, num_local: 2000, ..prompt };
        refused(many, "takes a number of local experts of at most 1024, got 2000");
    }

    #[test]
    fn quantised_experts_take_the_fast_kernels_where_these_read_them() {
        let int = |bits, group, act_order| QuantScheme::Int {
            bits,
            group: QuantGroup::Size(group),
            zero_point: true,
            act_order,
        };
        let call = |tokens, scheme, scales| {
            let weights = |gate_up| QuantWeights { scheme, scales, gate_up };
            ExpertsCall { tokens, quant: Some([weights(true), weights(false)]), ..QWEN3_30B }
        };
        let kernel =
            |call: &ExpertsCall, machine| ExpertsForm::choose(call, &machine).map(|form| form.kernel(call));
        let block = QuantScheme::Fp8 { scales: Fp8Scales::Block { n: 128, k: 128 } };
        for (scheme, scales) in
            [(int(4, 128, false), DType::F16), (int(8, 32, false), DType::BF16), (block, DType::F32)]
        {
            for (tokens, want) in [
                (1, "quant_layer_stream"),
                (6, "quant_experts_tensor"),
                (1023, "quant_experts_tensor"),
                (1024, "quant_experts_wide"),
            ] {
                assert_eq!(
                    kernel(&call(tokens, scheme, scales), hopper()).as_deref(),
                    Some(want),
                    "{scheme}"
                );
            }
            let invariant = Machine { batch_invariant: true, ..hopper() };
            assert_eq!(kernel(&call(1, scheme, scales), invariant).as_deref(), Some("quant_experts_tensor"));
            let ampere = Machine {
                gpu: Some(Gpu { compute_capability: (8, 0), ..Gpu::HOPPER }),
                ..Machine::default()
            };
            assert_eq!(kernel(&call(1, scheme, scales), ampere).as_deref(), Some("any_quant_experts"));
        }
        let group = int(4, 48, false);
        for (scheme, scales) in
            [(int(4, 128, true), DType::F16), (group, DType::F16), (int(4, 128, false), DType::F32)]
        {
            assert_eq!(kernel(&call(1, scheme, scales), hopper()).as_deref(), Some("any_quant_experts"));
        }
    }

    #[test]
    fn sizes_that_fit_no_shared_memory_say_so() {
        let wide = ExpertsCall { tokens: 4, hidden: 28_672, ..QWEN3_30B };
        let reason = wide.fits_one_launch(&hopper()).unwrap_err();
        assert!(matches!(reason, Reason::SharedMemory { .. }), "{reason}");
        let none = ExpertsCall { tokens: 1, num_local: 0, ..QWEN3_30B };
        assert_eq!(none.fits_one_launch(&hopper()), Err(Reason::NoLocalExperts));
        let many = ExpertsCall { tokens: 8, ..none };
        assert_eq!(many.fits_tensor(&hopper()), Err(Reason::NoLocalExperts));
    }
    #[test]
    fn deepseeks_experts_take_the_fast_kernels() {
        // DeepSeek-V2-Lite's and DeepSeek-V2's.
        for (num_local, hidden, inter) in [(64, 2048, 1408), (160, 5120, 1536)] {
            let call = |tokens| ExpertsCall {
                tokens,
                top_k: 6,
                num_ids: num_local,
                num_local,
                hidden,
                inter,
                quant: None,
            };
            let form = |tokens| ExpertsForm::choose(&call(tokens), &hopper());
            assert_eq!(form(1), Some(ExpertsForm::OneLaunch));
            assert_eq!(form(6), Some(ExpertsForm::Stream));
            assert_eq!(form(64), Some(ExpertsForm::Tensor));
            assert_eq!(form(8192), Some(ExpertsForm::Wide));
        }
    }
}
