//! The expert layer of a few tokens in one launch: from given ids, or with router, norm and addition inside.

use candle_core::{DType, Result, bail};

use super::epilogue::ExpertEpilogue;
use super::packs::Packs;
use crate::cuda::args::{In, LayerStreamArgs, Out, Output, QuantLayerStreamArgs, StepRoutingArgs};
use crate::cuda::{ffi, small};
use crate::exec::Exec;
use crate::monolithic::{Gate, PreNorm};
use crate::plan::ExpertsCall;
use crate::tags::GateScoring;
use crate::view::View;

/// Who chooses the experts.
pub(super) enum Choice<'a> {
    /// The router, inside the launch.
    Gate(&'a Gate<'a>),
    /// The caller: ids [T, K] u32 and weights [T, K] f32.
    Given(View<'a>, View<'a>),
}

/// Arguments of the launch, whose dims and dtypes the caller has checked.
pub(super) struct OneLaunch<'a> {
    pub op: &'static str,
    /// bf16 rows [T, H], or with a norm f32 ones.
    pub x: In,
    pub norm: Option<PreNorm<'a>>,
    pub choice: Choice<'a>,
    pub packs: Packs,
    pub expert_map: Option<View<'a>>,
    pub sizes: ExpertsCall,
    pub epilogue: ExpertEpilogue<'a>,
}

impl OneLaunch<'_> {
    /// Launches.
    pub fn run(&self, (out, output): (Out, Output), ex: &Exec) -> Result<()> {
        let op = self.op;
        let s = &self.sizes;
        if let Err(reason) = s.fits_one_launch(&ex.machine()) {
            bail!("{op}: the one launch {reason}")
        }
        let cuda = ex.cuda(op)?;
        let (mut ids, mut weights);
        let (ids, weights, gate) = match &self.choice {
            Choice::Gate(gate) => {
                ids = ex.scratch(DType::U32, &[s.tokens, s.top_k])?;
                weights = ex.scratch(DType::F32, &[s.tokens, s.top_k])?;
                let ids = cuda.write(op, "topk_ids", &mut ids.view_mut())?;
                (ids, cuda.write(op, "topk_weights", &mut weights.view_mut())?, Some(*gate))
            }
            // The kernel only reads given ids and weights.
            Choice::Given(ids, weights) => {
                let ids: In = cuda.read(op, "topk_ids", *ids)?;
                let weights: In = cuda.read(op, "topk_weights", *weights)?;
                (ids.cast_mut(), weights.cast_mut(), None)
            }
        };
        // SAFETY: a pure function of two numbers.
        let bytes = unsafe { ffi::moe_layer_stream_state(small(op, s.num_ids)?, small(op, s.inter)?) };
        let state = cuda.counters("layer_stream", bytes.div_ceil(4))?;
        let padded = gate.is_some_and(|gate| gate.padded);
        let valid = if padded { cuda.valid_rows()?.cast_const() } else { std::ptr::null() };
        let routing = match gate {
            Some(gate) => {
                let sizes = (s.tokens, s.num_ids.saturating_sub(gate.shared), gate.top_k);
                StepRoutingArgs::of(op, &gate.routing, sizes, cuda)?
            }
            None => StepRoutingArgs::NONE,
        };
        let groups = gate.and_then(|gate| gate.groups);
        // The same fields in both forms.
        macro_rules! args {
            ($name:ident { $($own:tt)* }) => {
                $name {
                    x: self.x,
                    norm: cuda.read_or_null(op, "norm", self.norm.map(|norm| norm.weight))?,
                    eps: self.norm.map_or(0.0, |norm| norm.eps),
                    gate: cuda.read_or_null(op, "gate", gate.map(|gate| gate.weight))?,
                    gate_bias: cuda.read_or_null(op, "gate_bias", gate.and_then(|gate| gate.bias))?,
                    correction_bias: cuda.read_or_null(
                        op,
                        "correction_bias",
                        gate.and_then(|gate| gate.correction_bias),
                    )?,
                    valid: valid.cast(),
                    topk_ids: ids,
                    topk_weights: weights,
                    expert_map: cuda.read_or_null(op, "expert_map", self.expert_map)?,
                    out,
                    output,
                    state,
                    tokens: small(op, s.tokens)?,
                    num_ids: small(op, s.num_ids)?,
                    top_k: small(op, s.top_k)?,
                    scoring: gate.map_or(GateScoring::Softmax, |gate| gate.scoring),
                    raw_logits: gate.map_or(0, |gate| i32::from(gate.raw_logits)),
                    renormalize: gate.map_or(0, |gate| i32::from(gate.renormalize)),
                    scale: gate.map_or(1., |gate| gate.scale),
                    softcap: gate.and_then(|gate| gate.softcap).unwrap_or(0.),
                    shared: small(op, gate.map_or(0, |gate| gate.shared))?,
                    shared_weight: gate.map_or(1., |gate| gate.shared_weight),
                    groups: small(op, groups.map_or(0, |groups| groups.count))?,
                    kept_groups: small(op, groups.map_or(0, |groups| groups.kept))?,
                    routing,
                    epilogue: self.epilogue.args(op, cuda)?,
                    $($own)*
                }
            };
        }
        // SAFETY: dims and dtypes are checked by the caller, the launchers' conditions above.
        unsafe {
            match self.packs {
                Packs::Floats { w13, w2 } => {
                    let hidden = small(op, s.hidden)?;
                    let inter = small(op, s.inter)?;
                    let num_local = small(op, s.num_local)?;
                    let args = args!(LayerStreamArgs { w13, w2, hidden, inter, num_local });
                    cuda.check(op, ffi::moe_layer_stream(&args, cuda.raw()?))
                }
                Packs::Quantised { w13, w2 } => {
                    let args = args!(QuantLayerStreamArgs { w13, w2 });
                    cuda.check(op, ffi::moe_quant_layer_stream(&args, cuda.raw()?))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::quant_format::QuantFormat;
    use crate::plan::{ColumnOrder, EpilogueCall, Gpu, Machine, QuantWeights};
    use crate::scheme::{QuantGroup, QuantScheme};

    /// bf16, integers of 4 bits, FP8, Q4_K.
    fn weights() -> [Option<[QuantWeights; 2]>; 4] {
        let pack = |scheme, scales| {
            let order = ColumnOrder::Input;
            [true, false].map(|gate_up| QuantWeights { scheme, scales, gate_up, in_blocks: false, order })
        };
        let group = QuantGroup::Size(64);
        let int = QuantScheme::int(4, group).with_zero_points(true);
        let fp8 = QuantScheme::fp8(QuantGroup::Channel);
        let q4k = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        [None, Some(pack(int, DType::F16)), Some(pack(fp8, DType::F32)), Some(pack(q4k, DType::U8))]
    }

    /// The answer of the kernel itself.
    fn fits(call: &ExpertsCall, gpu: Gpu) -> bool {
        let n = |n: usize| i32::try_from(n).unwrap();
        let ExpertsCall { tokens, top_k, num_ids, num_local, hidden, inter, quant, .. } = *call;
        let sizes = [tokens, hidden, inter, num_ids, num_local, top_k].map(n);
        let [tokens, hidden, inter, num_ids, num_local, top_k] = sizes;
        let memory = n(gpu.block_shared_memory);
        let format = quant.map(|[w13, _]| QuantFormat::of("test", w13.scheme).unwrap());
        // SAFETY: pure functions of numbers.
        let answer = unsafe {
            match format {
                None => ffi::moe_layer_stream_fits(tokens, hidden, inter, num_ids, num_local, top_k, memory),
                Some(format) => ffi::moe_quant_layer_stream_fits(
                    format, tokens, hidden, inter, num_ids, num_local, top_k, memory,
                ),
            }
        };
        answer == 1
    }

    #[test]
    fn the_host_and_the_kernel_agree_on_what_fits() {
        let gpu = Gpu::HOPPER;
        let machine = Machine { gpu: Some(gpu), ..Machine::default() };
        let mut fitting = 0;
        let mut refused = 0;
        for quant in weights() {
            for tokens in 1..=5 {
                for top_k in [1, 2, 6, 8, 16, 33] {
                    for hidden in [64, 96, 1024, 2048, 2880, 4096, 5120, 7168, 8192, 16_384, 28_672] {
                        for inter in [32, 64, 384, 768, 1408, 1536, 2048, 4096, 14_336] {
                            for num_ids in [1, 8, 64, 128, 512, 513] {
                                let num_local = num_ids;
                                let call = ExpertsCall {
                                    tokens,
                                    top_k,
                                    num_ids,
                                    num_local,
                                    hidden,
                                    inter,
                                    quant,
                                    passes: 1,
                                    epilogue: EpilogueCall::PLAIN,
                                };
                                let kernel = fits(&call, gpu);
                                let host = call.fits_one_launch(&machine);
                                assert_eq!(host.is_ok(), kernel, "{call:?}: {host:?}");
                                if kernel { fitting += 1 } else { refused += 1 }
                            }
                        }
                    }
                }
            }
        }
        assert!(fitting > 2000 && refused > 2000, "{fitting} fit, {refused} do not");
    }
}
