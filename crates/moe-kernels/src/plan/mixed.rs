//! Attention of a step whose first rows decode while prompts follow: one after the other, or the prompts on some SMs
//! while the decoding rows, which wait for memory, use the others.

use super::{AttentionCall, AttentionForm, Form, Machine, Rates, Reason, Rejected, Stage, WARPGROUPS};

/// Microseconds that prompts take on a whole card in addition to their FLOPs (25 us for 620 and 300 rows, 75 us for
/// 2,048 on an H200). Only the choice of a form uses it.
const PROMPTS_US: f64 = 16.0;
/// The largest part of the decoding rows' time that prompts may take on the whole card. If they took longer, they would
/// end much later than the decoding rows on a part of the card.
const MOST_OF_DECODE: f64 = 0.75;
/// The part of the SMs for prompts. With the other SMs a card still reads at almost its full rate, and the blocks of
/// the decoding rows use the SMs that prompts have left.
const SMS: (usize, usize) = (1, 2);
/// The mean number of positions from which on a decoding row is cut into two splits if no prompts run at the same time,
/// because the rows have different lengths.
const LONG: usize = 384;

/// What the attention of a step computes, and of a mixed step's two kinds of rows.
const ALL_ROWS: Parts = &["head norm", "rope", "kv write", "attention", GATES];
const DECODING_ROWS: Parts = &["head norm", "rope", "kv write", "attention of decoding rows", GATES];
const PROMPT_ROWS: Parts = &["head norm", "rope", "kv write", "attention of prompts", GATES];
/// The last part, for rows with gates.
const GATES: &str = "gated heads";

/// What a launch computes.
type Parts = &'static [&'static str];

impl AttentionCall {
    /// The kernel of these rows and, if it does not scale its results by gates, the kernel that does; with a kernel
    /// that was tried first.
    fn stages(&self, parts: Parts, rejected: Option<Rejected>, machine: &Machine) -> Vec<Stage> {
        let held = AttentionForm::choose(self, machine).is_some_and(|form| form.holds_gates(self));
        let attention = if held { parts } else { &parts[..parts.len() - 1] };
        let attention = AttentionForm::stage(attention, self, machine).after(rejected);
        let gates = (self.gates && !held).then(|| Stage::new(&[GATES], "sigmoid_gate"));
        std::iter::once(attention).chain(gates).collect()
    }
}

/// The rows of a mixed step, or of a step with only one kind of rows.
#[derive(Clone, Copy, Debug)]
pub struct MixedCall {
    /// The decoding rows.
    pub decode: AttentionCall,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// The rows of prompts.
    pub prompts: AttentionCall,
    /// (Row, position) pairs that the decoding rows see; 0: not known.
    pub decode_scores: usize,
    /// (Row, position) pairs that the rows of prompts see; 0: not known.
    pub prompt_scores: usize,
}

/// How the attention of a mixed step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixedForm {
    /// The prompts run on some SMs, the decoding rows at the same time on the others.
    Overlapped,
    /// One after the other.
    Apart,
}

impl Form for MixedForm {
    type Call = MixedCall;

    const ALL: &'static [Self] = &[Self::Overlapped, Self::Apart];

    fn name(self) -> &'static str {
        match self {
            Self::Overlapped => "prompts next to decoding rows",
            Self::Apart => "decoding rows, then prompts",
        }
    }

    fn fits(self, call: &MixedCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Apart {
            return Ok(());
        }
        let gpu = machine.expect_tuned(WARPGROUPS)?;
        AttentionForm::Decode.fits(&call.decode, machine)?;
        AttentionForm::Wgmma.fits(&call.prompts, machine)?;
        if call.prompts.gates && !AttentionForm::Wgmma.holds_gates(&call.prompts) {
            return Err(Reason::Part { part: "gates of heads of this size" });
        }
        if call.decode_scores == 0 || call.prompt_scores == 0 {
            return Err(Reason::NoGain("how many positions the rows see is not known"));
        }
        if call.prompt_us(&gpu.rates) > MOST_OF_DECODE * call.decode_us(&gpu.rates) {
            return Err(Reason::NoGain(
                "the prompts take longer than the decoding rows on a part of the card",
            ));
        }
        Ok(())
    }
}

impl MixedCall {
    /// The kernels of [`rope_attention_into`](crate::rope_attention_into), in their order.
    pub fn stages(&self, machine: &Machine) -> Vec<Stage> {
        let Self { decode, prompts, .. } = self;
        let apart = decode.rows > 0 && AttentionForm::Decode.fits(decode, machine).is_ok();
        if !apart || prompts.rows == 0 {
            let rows = decode.rows + prompts.rows;
            let one_row_each = prompts.rows == 0;
            let all = AttentionCall { rows, one_row_each, ..*prompts };
            return all.stages(ALL_ROWS, None, machine);
        }
        let prompts = prompts.stages(PROMPT_ROWS, None, machine);
        match MixedForm::Overlapped.fits(self, machine) {
            Ok(()) => [prompts, decode.stages(DECODING_ROWS, None, machine)].concat(),
            Err(reason) => {
                let kernel = MixedForm::Overlapped.name().to_string();
                let rejected = Some(Rejected { kernel, reason });
                [decode.stages(DECODING_ROWS, rejected, machine), prompts].concat()
            }
        }
    }

    /// SMs for the prompts, of `sms`.
    pub fn prompt_sms(sms: usize) -> usize {
        (sms * SMS.0 / SMS.1).max(1)
    }

    /// The number of splits of each decoding row if `splits` fill the card. With one split for each row, the card is
    /// half empty while the longest rows end. With prompts at the same time, which end earlier, two splits take longer
    /// than one.
    pub fn decode_splits(&self, form: MixedForm, splits: usize) -> usize {
        let long = self.decode.rows > 0 && self.decode_scores / self.decode.rows >= LONG;
        if long && form == MixedForm::Apart { splits.max(2) } else { splits }
    }

    /// The time in which the decoding rows' keys and values are read.
    fn decode_us(&self, rates: &Rates) -> f64 {
        let AttentionCall { head_dim, value_dim, dtype, .. } = self.decode;
        let row = self.num_kv_heads * (head_dim + value_dim) * dtype.size_in_bytes();
        self.decode_scores as f64 * row as f64 / rates.read as f64
    }

    /// The time of the prompts' products on the whole card.
    fn prompt_us(&self, rates: &Rates) -> f64 {
        let AttentionCall { num_heads, head_dim, value_dim, .. } = self.prompts;
        let flops = 2 * num_heads * (head_dim + value_dim);
        PROMPTS_US + self.prompt_scores as f64 * flops as f64 / rates.flops as f64
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::plan::Gpu;

    fn call(decode_scores: usize, prompt_scores: usize) -> MixedCall {
        let decode = AttentionCall {
            rows: 256,
            one_row_each: true,
            num_heads: 32,
            head_dim: 128,
            value_dim: 128,
            latent: false,
            sinks: false,
            gates: false,
            dtype: DType::BF16,
            block_size: Some(16),
            aligned: true,
        };
        let prompts = AttentionCall { rows: 900, one_row_each: false, ..decode };
        MixedCall { decode, num_kv_heads: 4, prompts, decode_scores, prompt_scores }
    }

    #[test]
    fn short_prompts_overlap_many_decoding_rows() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let form = |call: &MixedCall, machine: &Machine| MixedForm::choose(call, machine);
        // 256 sequences of 800 positions read 420 MB; prompts of 620 and 300 rows see 240,000 pairs.
        let usual = call(204_800, 240_000);
        assert_eq!(form(&usual, &hopper), Some(MixedForm::Overlapped));
        // A prompt's last 1,024 rows of 32,768 take ten times as long as the decoding rows.
        assert_eq!(form(&call(204_800, 33_000_000), &hopper), Some(MixedForm::Apart));
        assert_eq!(form(&call(0, 240_000), &hopper), Some(MixedForm::Apart));
        assert_eq!(form(&call(204_800, 0), &hopper), Some(MixedForm::Apart));
        assert_eq!(form(&call(256, 1), &hopper), Some(MixedForm::Apart));
        let pages = MixedCall { prompts: AttentionCall { block_size: Some(7), ..usual.prompts }, ..usual };
        assert_eq!(form(&pages, &hopper), Some(MixedForm::Apart));
        for machine in [Machine { batch_invariant: true, ..hopper }, Machine::default()] {
            assert_eq!(form(&usual, &machine), Some(MixedForm::Apart));
        }
    }

    #[test]
    fn a_step_lists_its_launches_in_their_order() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let names = |call: &MixedCall, machine: &Machine| -> Vec<String> {
            call.stages(machine).into_iter().map(|stage| stage.kernel).collect()
        };
        let decode = "attention_decode";
        let prompts = "attention_prefill_wgmma";
        assert_eq!(names(&call(204_800, 240_000), &hopper), [prompts, decode]);
        let apart = call(204_800, 0);
        assert_eq!(names(&apart, &hopper), [decode, prompts]);
        assert_eq!(apart.stages(&hopper)[0].rejected[0].kernel, MixedForm::Overlapped.name());
        let rows = |decode, prompts| MixedCall {
            decode: AttentionCall { rows: decode, ..apart.decode },
            prompts: AttentionCall { rows: prompts, ..apart.prompts },
            ..apart
        };
        assert_eq!(names(&rows(7, 0), &hopper), [decode]);
        assert_eq!(names(&rows(0, 7), &hopper), [prompts]);
        let invariant = Machine { batch_invariant: true, ..hopper };
        assert_eq!(names(&apart, &invariant), [prompts]);
        assert_eq!(names(&apart, &Machine::default()), ["cpu_attention"]);
    }

    #[test]
    fn heads_of_256_hold_their_gates() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let gated = |head_dim: usize, call: MixedCall| {
            let of =
                |rows: AttentionCall| AttentionCall { gates: true, head_dim, value_dim: head_dim, ..rows };
            MixedCall { decode: of(call.decode), prompts: of(call.prompts), ..call }
        };
        let names = |call: &MixedCall, machine: &Machine| -> Vec<String> {
            call.stages(machine).into_iter().map(|stage| stage.kernel).collect()
        };
        let decode = "attention_decode";
        let prompts = "attention_prefill_wgmma";
        let gate = "sigmoid_gate";
        let both = call(204_800, 120_000);
        assert_eq!(names(&gated(256, both), &hopper), [prompts, decode]);
        assert_eq!(names(&gated(128, both), &hopper), [decode, gate, prompts, gate]);
        assert_eq!(names(&gated(192, both), &hopper), ["any_attention", gate]);
        assert_eq!(names(&gated(256, both), &Machine::default()), ["cpu_attention", gate]);
        let parts = |call: &MixedCall| {
            call.stages(&hopper).iter().map(|s| s.computes.last().copied()).collect::<Vec<_>>()
        };
        assert_eq!(parts(&gated(256, both)), [Some(GATES); 2]);
        assert_eq!(parts(&both), [Some("attention of prompts"), Some("attention of decoding rows")]);
    }

    #[test]
    fn long_rows_that_nothing_overlaps_are_cut_in_two() {
        let splits = |call: MixedCall, form, splits| call.decode_splits(form, splits);
        assert_eq!(splits(call(256 * 800, 1000), MixedForm::Apart, 1), 2);
        assert_eq!(splits(call(256 * 800, 1000), MixedForm::Apart, 8), 8);
        assert_eq!(splits(call(256 * 800, 1000), MixedForm::Overlapped, 1), 1);
        assert_eq!(splits(call(256 * 300, 1000), MixedForm::Apart, 1), 1);
        assert_eq!(splits(call(0, 0), MixedForm::Apart, 1), 1);
        assert_eq!((MixedCall::prompt_sms(132), MixedCall::prompt_sms(1)), (66, 1));
    }
}
