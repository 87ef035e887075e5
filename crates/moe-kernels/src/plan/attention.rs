//! Attention over the paged KV cache: which kernels run a step's rows.

use candle_core::DType;

use super::checks::{expect_at_most, expect_bf16};
use super::{Form, Machine, Reason, TENSOR_CORES, WARPGROUPS};

/// The largest number of rows of a grid.
pub(crate) const MAX_ROWS: usize = 65_535;
/// Positions of a tile of the kernel on warpgroup products.
const TILE: usize = 128;
/// Head sizes of the fast kernels.
const HEAD_DIMS: &[usize] = &[64, 128, 256];
/// Size of the heads whose fast kernels scale results by gates.
const GATED_HEAD_DIM: usize = 256;
/// The sizes of a latent row for which kernels are compiled; the value is the beginning of the row. They are
/// DeepSeek's.
const LATENT_KEYS: &[usize] = &[576];
const LATENT_VALUES: &[usize] = &[512];
/// The largest number of rows, and of heads, of the kernel for one new row of each of a few sequences over latent rows.
const LATENT_DECODE_ROWS: usize = 8;
const LATENT_DECODE_HEADS: usize = 16;
/// Shared memory of the kernels, bytes; the kernels assert the same. On warpgroup products, with heads of these sizes.
const WGMMA_BYTES: [(usize, usize); 3] = [(64, 115_712), (128, 230_400), (256, 197_632)];
const LATENT_DECODE_BYTES: usize = 177_664;
const LATENT_BYTES: usize = 231_424;
/// With heads of 256; with smaller ones less than every card has without being asked.
const DECODE_BYTES: usize = 78_272;
/// For each 128 columns of a head.
const PREFILL_BYTES: usize = 81_920;

/// Head norm, rotation, cache write and attention of a step's rows.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Rows T.
    pub rows: usize,
    /// Whether row i is the one new row of sequence i.
    pub one_row_each: bool,
    /// Query heads.
    pub num_heads: usize,
    /// Size of a head's key.
    pub head_dim: usize,
    /// Size of a head's value.
    pub value_dim: usize,
    /// Whether all heads share one key, and a value is the beginning of its key (latent rows).
    pub latent: bool,
    /// Whether heads have sinks.
    pub sinks: bool,
    /// Whether gates scale what the rows have attended to.
    pub gates: bool,
    /// Dtype of the cache.
    pub dtype: DType,
    /// Slots of a block of the cache; `None` in a plan, where there is no cache yet.
    pub block_size: Option<usize>,
    /// Whether all views begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// The kernels of [`rope_attention_into`](crate::rope_attention_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionForm {
    /// Everything in one launch (`attention_decode`), for one new row of each sequence. Rows of prompts may follow in
    /// the same step. A row's bits are not the same as in a prompt.
    Decode,
    /// Head norm, rotation and cache write in one launch, then attention on Hopper's warpgroup products
    /// (`attention_prefill_wgmma`). Sequences with a few rows use `attention_prefill`.
    Wgmma,
    /// Latent rows, for one new row of each of a few sequences. All SMs share the positions of a row, and another
    /// launch merges (`attention_latent_decode`).
    LatentDecode,
    /// Latent rows on Hopper's warpgroup products, of any mix of rows, whose keys are in the cache
    /// (`attention_latent`).
    Latent,
    /// [`Wgmma`](Self::Wgmma) with the tensor cores of any card (`attention_prefill`).
    Prefill,
    /// Any dtype and head size on CUDA.
    Any,
    /// The CPU.
    Cpu,
}

impl Form for AttentionForm {
    type Call = AttentionCall;

    const ALL: &'static [Self] =
        &[Self::Decode, Self::Wgmma, Self::LatentDecode, Self::Latent, Self::Prefill, Self::Any, Self::Cpu];

    fn name(self) -> &'static str {
        match self {
            Self::Decode => "attention_decode",
            Self::Wgmma => "attention_prefill_wgmma",
            Self::LatentDecode => "attention_latent_decode",
            Self::Latent => "attention_latent",
            Self::Prefill => "attention_prefill",
            Self::Any => "any_attention",
            Self::Cpu => "cpu_attention",
        }
    }

    fn fits(self, call: &AttentionCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::Decode => {
                let gpu = machine.expect_tuned(TENSOR_CORES)?;
                machine.expect_batch_variant()?;
                if !call.one_row_each {
                    return Err(Reason::OneRowEach);
                }
                expect_at_most("rows", MAX_ROWS, call.rows)?;
                call.expect_fast()?;
                if call.head_dim > 128 { gpu.expect_shared_memory(DECODE_BYTES) } else { Ok(()) }
            }
            Self::Wgmma => {
                let gpu = machine.expect_tuned(WARPGROUPS)?;
                call.expect_pages()?;
                call.expect_fast()?;
                let bytes = WGMMA_BYTES.iter().find(|(head_dim, _)| *head_dim == call.head_dim);
                bytes.map_or(Ok(()), |&(_, bytes)| gpu.expect_shared_memory(bytes))
            }
            Self::LatentDecode => {
                let gpu = machine.expect_tuned(WARPGROUPS)?;
                gpu.expect_shared_memory(LATENT_DECODE_BYTES)?;
                machine.expect_batch_variant()?;
                call.expect_latent()?;
                call.expect_pages()?;
                if !call.one_row_each {
                    return Err(Reason::OneRowEach);
                }
                expect_at_most("rows", LATENT_DECODE_ROWS, call.rows)?;
                expect_at_most("heads", LATENT_DECODE_HEADS, call.num_heads)
            }
            Self::Latent => {
                machine.expect_tuned(WARPGROUPS)?.expect_shared_memory(LATENT_BYTES)?;
                call.expect_latent()?;
                call.expect_pages()
            }
            Self::Prefill => {
                let gpu = machine.expect_tuned(TENSOR_CORES)?;
                call.expect_fast()?;
                gpu.expect_shared_memory(PREFILL_BYTES * call.head_dim.div_ceil(128))
            }
            Self::Any => machine.expect_gpu().map(drop),
            Self::Cpu => machine.expect_cpu(),
        }
    }
}

impl AttentionForm {
    /// Whether its launches also scale results by their gates. Otherwise `sigmoid_gate` follows.
    pub fn holds_gates(self, call: &AttentionCall) -> bool {
        call.gates
            && matches!(self, Self::Decode | Self::Wgmma | Self::Prefill)
            && call.head_dim == GATED_HEAD_DIM
    }
}

impl AttentionCall {
    /// The positions of a tile must be in whole blocks of at least the 8 rows of a swizzle, or in a part of one block.
    fn expect_pages(&self) -> Result<(), Reason> {
        match self.block_size {
            Some(got) if got < 8 || !(TILE.is_multiple_of(got) || got.is_multiple_of(TILE)) => {
                Err(Reason::BlockSize { got })
            }
            _ => Ok(()),
        }
    }

    fn expect_fast(&self) -> Result<(), Reason> {
        expect_bf16(self.dtype)?;
        expect_one_of("head_dim", HEAD_DIMS, self.head_dim)?;
        if self.num_heads == 0 {
            return Err(Reason::Part { part: "attention without heads" });
        }
        if self.value_dim != self.head_dim || self.latent {
            return Err(Reason::Part { part: "values of another size than keys" });
        }
        self.expect_aligned()
    }

    fn expect_latent(&self) -> Result<(), Reason> {
        if !self.latent || self.num_heads == 0 {
            return Err(Reason::Part { part: "keys of several heads" });
        }
        if self.sinks {
            return Err(Reason::Part { part: "attention sinks over latent rows" });
        }
        expect_bf16(self.dtype)?;
        expect_one_of("head_dim", LATENT_KEYS, self.head_dim)?;
        expect_one_of("value_dim", LATENT_VALUES, self.value_dim)?;
        self.expect_aligned()
    }

    fn expect_aligned(&self) -> Result<(), Reason> {
        if self.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}

fn expect_one_of(dimension: &'static str, accepted: &'static [usize], got: usize) -> Result<(), Reason> {
    if accepted.contains(&got) { Ok(()) } else { Err(Reason::OneOf { dimension, accepted, got }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Gpu;

    #[test]
    fn prompts_take_warpgroup_products_where_pages_and_card_allow() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let ampere = Gpu::ampere();
        let ampere = Machine { gpu: Some(ampere), ..Machine::default() };
        let form_of = |head_dim, one_row_each, block_size, machine: &Machine| {
            let rows = 300;
            let num_heads = 32;
            let call = AttentionCall {
                rows,
                one_row_each,
                num_heads,
                head_dim,
                value_dim: head_dim,
                latent: false,
                sinks: false,
                gates: false,
                dtype: DType::BF16,
                block_size,
                aligned: true,
            };
            AttentionForm::choose(&call, machine).map(Form::name)
        };
        let form =
            |one_row_each, block_size, machine: &Machine| form_of(128, one_row_each, block_size, machine);
        for block_size in [None, Some(8), Some(16), Some(128), Some(256)] {
            assert_eq!(form(false, block_size, &hopper), Some("attention_prefill_wgmma"), "{block_size:?}");
        }
        for block_size in [1, 4, 7, 12, 96, 192] {
            assert_eq!(form(false, Some(block_size), &hopper), Some("attention_prefill"), "{block_size}");
        }
        assert_eq!(form(false, Some(16), &ampere), Some("attention_prefill"));
        assert_eq!(form(true, Some(16), &hopper), Some("attention_decode"));
        let invariant = Machine { batch_invariant: true, ..hopper };
        assert_eq!(form(true, Some(16), &invariant), Some("attention_prefill_wgmma"));
        // Heads of 256 take more shared memory than smaller cards of 8.x have.
        let ada = Gpu { block_shared_memory: 101_376, ..Gpu::ampere() };
        let ada = Machine { gpu: Some(ada), ..Machine::default() };
        for (one_row_each, block_size, machine, name) in [
            (false, 16, &hopper, "attention_prefill_wgmma"),
            (false, 7, &hopper, "attention_prefill"),
            (false, 16, &ampere, "attention_prefill"),
            (false, 16, &ada, "any_attention"),
            (true, 16, &ada, "attention_decode"),
        ] {
            assert_eq!(form_of(256, one_row_each, Some(block_size), machine), Some(name));
        }
        assert_eq!(form_of(192, true, Some(16), &hopper), Some("any_attention"));
    }

    #[test]
    fn latent_rows_take_their_kernel_where_sizes_and_card_allow() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let ampere = Gpu::ampere();
        let ampere = Machine { gpu: Some(ampere), ..Machine::default() };
        let call = AttentionCall {
            rows: 3,
            one_row_each: false,
            num_heads: 16,
            head_dim: 576,
            value_dim: 512,
            latent: true,
            sinks: false,
            gates: false,
            dtype: DType::BF16,
            block_size: Some(16),
            aligned: true,
        };
        let form = |call: &AttentionCall, machine: &Machine| {
            AttentionForm::choose(call, machine).map(AttentionForm::name)
        };
        for (one_row_each, rows, num_heads, name) in [
            (false, 3, 16, "attention_latent"),
            (true, 3, 16, "attention_latent_decode"),
            (true, 8, 4, "attention_latent_decode"),
            (true, 9, 16, "attention_latent"),
            (true, 1, 128, "attention_latent"),
        ] {
            let call = AttentionCall { one_row_each, rows, num_heads, ..call };
            assert_eq!(form(&call, &hopper), Some(name));
            let invariant = Machine { batch_invariant: true, ..hopper };
            assert_eq!(form(&call, &invariant), Some("attention_latent"));
            assert_eq!(form(&call, &ampere), Some("any_attention"));
            assert_eq!(form(&call, &Machine::default()), Some("cpu_attention"));
        }
        for other in [
            AttentionCall { dtype: DType::F32, ..call },
            AttentionCall { head_dim: 320, ..call },
            AttentionCall { value_dim: 256, ..call },
            AttentionCall { block_size: Some(7), ..call },
            AttentionCall { aligned: false, ..call },
            AttentionCall { sinks: true, ..call },
            AttentionCall { latent: false, ..call },
            AttentionCall { latent: false, head_dim: 128, value_dim: 64, ..call },
        ] {
            assert_eq!(form(&other, &hopper), Some("any_attention"), "{other:?}");
        }
    }
}
