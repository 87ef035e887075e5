//! What the launch of a whole expert layer supports: its limits, and the shared memory of a block.

use super::quant::{row_pitch, takes_digits};
use super::{ExpertsCall, Gpu, Reason};
use crate::scheme::QuantScheme;

/// Limits of the one launch (cuda/layer, `moe_layer_stream`).
pub(super) const ONE_LAUNCH_TOKENS: usize = 4;
pub(super) const ONE_LAUNCH_SLOTS: usize = 32;
pub(super) const ONE_LAUNCH_EXPERTS: usize = 512;
pub(super) const ONE_LAUNCH_LOCAL: usize = 1024;

impl ExpertsCall {
    /// Fails if a block's shared memory has no room for the rows, activations and rings of weights of the one launch.
    pub(super) fn expect_shared_memory(&self, gpu: Gpu) -> Result<(), Reason> {
        gpu.expect_shared_memory(match self.quant {
            None => self.one_launch_bytes(),
            Some([w13, _]) => self.quant_one_launch_bytes(w13.scheme),
        })
    }

    /// The smallest number of bytes of shared memory of the one launch: `layout` and `divide_ring` of its kernel, with
    /// which a test compares it.
    fn one_launch_bytes(&self) -> usize {
        const CONSUMERS: usize = 8; // warps
        const PAIRS: usize = 8; // gate and up rows of a tile
        const DOWN_ROWS: usize = 16;
        const PARTS: usize = 4;
        const STAGES: usize = 16;
        const MAX_CHUNK: [usize; 2] = [2048, 1536];
        const MIN_CHUNK: usize = 256;
        const MIN_STAGES: usize = 2;
        let tokens = self.tokens;
        let slots = self.slots();
        let tiles = 8 * (4 * STAGES + ONE_LAUNCH_SLOTS + 2 * PARTS + 1);
        let routing = (tiles + 8 * (STAGES + PARTS + 1)).next_multiple_of(16);
        let partial =
            (routing + 4 * ONE_LAUNCH_TOKENS + slots * 12 + slots * tokens * 8).next_multiple_of(16);
        let parts = partial + CONSUMERS * DOWN_ROWS * tokens * 4;
        let rows = (parts + PARTS * CONSUMERS * 2 * PAIRS * tokens * 4).next_multiple_of(128);
        let act = rows + tokens * self.hidden * 2;
        let ring = (act + slots * self.inter * 2).next_multiple_of(128);
        let stage = |depth: usize, rows: usize, most: usize| {
            let mut chunk = depth.min(most);
            while chunk.is_multiple_of(2 * 64) && chunk > MIN_CHUNK {
                chunk /= 2;
            }
            rows * chunk * 2
        };
        let gate_up = stage(self.hidden, 2 * PAIRS, MAX_CHUNK[0]);
        let down = stage(self.inter, DOWN_ROWS, MAX_CHUNK[1]);
        ring + MIN_STAGES * gate_up.max(down)
    }

    /// Bytes of shared memory of the same launch with quantised weights: `layout` of its kernel, with which a test
    /// compares it.
    fn quant_one_launch_bytes(&self, scheme: QuantScheme) -> usize {
        const WARPS: usize = 16;
        const ACT_COLUMNS: usize = 3 * 128; // of a warp's activations of all tokens
        const SIDE: usize = 192; // bytes of a step's scales and zero points
        let (step, depth) = if scheme.bits() == 4 { (1024, 6) } else { (2048, 3) };
        let tokens = self.tokens;
        let slots = self.slots();
        let slot_of =
            (8 * (ONE_LAUNCH_SLOTS + 1) + 8 + 4 * ONE_LAUNCH_TOKENS + 13 * slots).next_multiple_of(16);
        let sums = slot_of + 4 * ONE_LAUNCH_TOKENS * slots;
        let parts = (sums + 8 * WARPS * tokens).next_multiple_of(16) + WARPS * 512;
        let digits = takes_digits(scheme);
        let act = (ONE_LAUNCH_TOKENS * row_pitch(ACT_COLUMNS, digits)).next_multiple_of(128);
        let rows = (parts + 128 * slots).next_multiple_of(16) + WARPS * act;
        let ring = (rows + tokens * row_pitch(self.hidden, digits)).next_multiple_of(128);
        ring + WARPS * depth * (step + SIDE)
    }
}
