//! The gated delta rule: row after row, or long prompts in chunks.

use candle_core::DType;

use super::checks::{expect_bf16, expect_rows, expect_steps};
use super::{Form, Machine, Reason};
use crate::operands::DeltaHeads;

/// Rows of a chunk, and the fewest rows of a sequence that is computed in chunks. The kernels have the same number.
const CHUNK: usize = 64;
/// Dimensions of a key head for which the kernels are compiled.
const KEY_DIMS: &[usize] = &[128];
/// Columns of a block's state.
const COLUMNS: usize = 32;
/// Bytes of the operands of a chunk, of a key head and of a value head; the kernels assert the same.
#[cfg(any(feature = "cuda", test))]
const KEY_BYTES: usize = 49_152;
#[cfg(any(feature = "cuda", test))]
const VALUE_BYTES: usize = 20_992;
/// The most bytes of operands between two launches. Prompts with more chunks are computed in several passes.
#[cfg(any(feature = "cuda", test))]
const WORKSPACE: usize = 256 << 20;

/// The gated delta rule of a step.
#[derive(Clone, Copy, Debug)]
pub struct DeltaCall {
    /// Rows of prompts: those that are not the one new row of a sequence.
    pub prompt_rows: usize,
    /// The heads.
    pub heads: DeltaHeads,
    /// Dtype of the model.
    pub dtype: DType,
    /// Whether all views begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// How [`gated_delta_into`](crate::gated_delta_into) computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeltaForm {
    /// Sequences with at least 64 rows in the step in chunks of 64 rows on tensor cores, the others row after row
    /// (`gated_delta_chunks`). A row's bits are not the same in both.
    Chunks,
    /// Row after row, on CUDA or on the CPU.
    Rows,
}

impl Form for DeltaForm {
    type Call = DeltaCall;

    const ALL: &'static [Self] = &[Self::Chunks, Self::Rows];

    fn name(self) -> &'static str {
        match self {
            Self::Chunks => "gated_delta_chunks",
            Self::Rows => "gated_delta",
        }
    }

    fn fits(self, call: &DeltaCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Rows {
            return Ok(());
        }
        machine.expect_gpu()?;
        machine.expect_batch_variant()?;
        // Keys are rounded to bf16.
        expect_bf16(call.dtype)?;
        let DeltaHeads { key_dim, value_dim, .. } = call.heads;
        if !KEY_DIMS.contains(&key_dim) {
            return Err(Reason::OneOf { dimension: "key_dim", accepted: KEY_DIMS, got: key_dim });
        }
        expect_steps("value_dim", value_dim, COLUMNS)?;
        expect_rows(CHUNK.., call.prompt_rows)?;
        if call.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}

impl DeltaCall {
    /// Bytes of the operands of a chunk.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.heads.key_heads * KEY_BYTES + self.heads.value_heads * VALUE_BYTES
    }

    /// The number of chunks of a pass over a step of `rows` rows. Sequences never have more than twice as many as the
    /// rows fill (65 rows are two chunks). So no step needs more memory than the one with the most rows, by which the
    /// engine measures it.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn chunks(&self, rows: usize) -> usize {
        (rows / CHUNK * 2).min(WORKSPACE / self.chunk_bytes()).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Gpu;

    const CALL: DeltaCall = DeltaCall {
        prompt_rows: 64,
        heads: DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 },
        dtype: DType::BF16,
        aligned: true,
    };

    #[test]
    fn long_prompts_of_models_in_bf16_are_computed_in_chunks() {
        let form = |call: DeltaCall, machine: &Machine| DeltaForm::choose(&call, machine);
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let later = Gpu::new((12, 0), 101_376, 170).unwrap();
        for gpu in [Gpu::HOPPER, Gpu::ampere(), later] {
            let machine = Machine { gpu: Some(gpu), ..Machine::default() };
            assert_eq!(form(CALL, &machine), Some(DeltaForm::Chunks));
        }
        for machine in [Machine { batch_invariant: true, ..hopper }, Machine::default()] {
            assert_eq!(form(CALL, &machine), Some(DeltaForm::Rows));
        }
        for other in [
            DeltaCall { prompt_rows: 63, ..CALL },
            DeltaCall { dtype: DType::F32, ..CALL },
            DeltaCall { dtype: DType::F16, ..CALL },
            DeltaCall { heads: DeltaHeads { key_dim: 64, ..CALL.heads }, ..CALL },
            DeltaCall { heads: DeltaHeads { value_dim: 48, ..CALL.heads }, ..CALL },
            DeltaCall { aligned: false, ..CALL },
        ] {
            assert_eq!(form(other, &hopper), Some(DeltaForm::Rows), "{other:?}");
        }
    }

    #[test]
    fn a_pass_has_as_many_chunks_as_memory_allows() {
        assert_eq!(CALL.chunks(64), 2);
        assert_eq!(CALL.chunks(130), 4);
        let most = CALL.chunks(8192);
        assert_eq!(CALL.chunks(16_384), most);
        assert!(most * CALL.chunk_bytes() <= WORKSPACE && (most + 1) * CALL.chunk_bytes() > WORKSPACE);
        let wide = DeltaHeads { key_heads: 1 << 20, value_heads: 1 << 20, ..CALL.heads };
        assert_eq!(DeltaCall { heads: wide, ..CALL }.chunks(8192), 1);
    }
}
