//! The launch that computes the whole expert layer of a few tokens (norm, router, experts and their weighted sum, added
//! to the residual stream or stored), compared with the definition.

use candle_core::DType;
use moe_kernels::cuda::{MonolithicExperts, monolithic_experts_into};
use moe_kernels::half::bf16;
use moe_kernels::plan::{ExpertsCall, Form, Fusion, MonolithicCall, MonolithicForm};
use moe_kernels::{
    Activation, Buffer, ForcedWeights, NO_EXPERT, PreNorm, QuantGroup, QuantScheme, SublayerIo,
};

use crate::common::*;
use crate::definition::{product, relative_error};
use crate::gates::{Case, Rule};
use crate::packs::Packs;
use crate::quant::matrices::{fp4, fp8, int, q4k};

const EPS: f32 = 1e-6;

/// A layer of a step.
struct Layer<'a> {
    case: Case,
    packs: &'a Packs,
    /// If set, rows are the residual stream: the experts take its norm, and their sum is added to it. Otherwise the sum
    /// is stored.
    gain: Option<Buffer>,
    map: Option<Vec<i32>>,
}

impl<'a> Layer<'a> {
    /// A layer that adds its sum; with `is_stored` it stores the sum.
    fn new(rng: &mut Rng, rule: Rule, sizes: [usize; 3], packs: &'a Packs, is_stored: bool) -> Self {
        let [tokens, experts, top_k] = sizes;
        let hidden = packs.meaning.hidden;
        let dtype = if is_stored { DType::BF16 } else { DType::F32 };
        let rows = rng.floats(dtype, &[tokens, hidden]);
        let gain = (!is_stored).then(|| rng.floats(DType::BF16, &[hidden]));
        Self { case: Case::new(rng, rule, rows, experts, top_k), packs, gain, map: None }
    }

    fn fits(&self) -> bool {
        let [w13, w2] = &self.packs.weights;
        let experts = ExpertsCall {
            tokens: self.case.tokens(),
            top_k: self.case.top_k + self.case.shared,
            num_ids: self.case.experts + self.case.shared,
            num_local: self.packs.meaning.weights.len(),
            hidden: self.packs.meaning.hidden,
            inter: self.packs.inter,
            quant: w13.quantisation().zip(w2.quantisation()).map(Into::into),
            passes: 1,
            epilogue: self.packs.epilogue_call(),
        };
        let fusion = if self.gain.is_some() { Fusion::NormAdd } else { Fusion::Nothing };
        let call = MonolithicCall { experts, dtype: DType::BF16, gate: DType::BF16, fusion };
        MonolithicForm::choose(&call, &cuda().machine()) == Some(MonolithicForm::OneLaunch)
    }

    /// The choices, if they are watched, and the output of the launch: sums or the residual stream.
    fn run(&self, is_watched: bool) -> (Vec<u32>, Buffer) {
        let mut p = Place::new(cuda());
        let gain = p.put_some(self.gain.as_ref());
        let map = self.map.as_ref().map(|map| Buffer::from_vec(map.clone(), &[map.len()]).unwrap());
        let map = p.put_some(map.as_ref());
        let (x, mut out) = match &gain {
            Some(_) => (None, p.put(&self.case.rows)),
            None => (Some(p.put(&self.case.rows)), p.out(DType::F32, self.case.rows.dims())),
        };
        let [w13, w2] = self.packs.weights.each_ref().map(|weight| weight.read().unwrap());
        let chosen = self.case.with_gate(is_watched, &mut p, |gate, p| {
            let w13 = w13.view().unwrap();
            let w2 = w2.view().unwrap();
            let epilogue = self.packs.epilogue();
            let args = MonolithicExperts { gate, w13, w2, expert_map: view_of(&map), epilogue };
            let io = match (&gain, &x) {
                (Some(gain), _) => SublayerIo::NormAdd {
                    norm: PreNorm { weight: gain.view(), eps: EPS },
                    residual: out.view_mut(),
                },
                (_, x) => SublayerIo::Store { x: view_of(x).unwrap(), out: out.view_mut() },
            };
            monolithic_experts_into(MonolithicForm::OneLaunch, &args, io, &mut p.ex).unwrap();
        });
        (chosen, out.host(&p))
    }

    /// The rows that router and experts take as input.
    fn rows(&self) -> Vec<f32> {
        let rows = self.case.rows.view().to_f32_vec().unwrap();
        let Some(gain) = &self.gain else { return rows };
        let (gain, hidden) = (gain.view().to_f32_vec().unwrap(), gain.dims()[0]);
        let normed = |row: &[f32]| {
            let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            let factor = (squares / hidden as f64 + f64::from(EPS)).sqrt().recip() as f32;
            // The product is rounded before the factor, as in the kernel.
            let each = row.iter().zip(&gain).map(|(x, gain)| bf16::from_f32(x * gain).to_f32() * factor);
            each.collect::<Vec<_>>()
        };
        rows.chunks(hidden).flat_map(normed).collect()
    }

    /// Fails unless `got` is the output of experts `ids` with these weights.
    fn assert_sums(&self, what: &str, ids: &[u32], weights: &[f64], got: &Buffer) {
        let local = |id: &u32| match &self.map {
            Some(map) => {
                map.get(*id as usize).and_then(|slot| u32::try_from(*slot).ok()).unwrap_or(NO_EXPERT)
            }
            None => *id,
        };
        let ids: Vec<u32> = ids.iter().map(local).collect();
        let weights: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
        let want = self.packs.meaning.sums(&self.rows(), &ids, &weights, <[f32]>::to_vec);
        let mut got = got.view().to_f32_vec().unwrap();
        if self.gain.is_some() {
            let before = self.case.rows.view().to_f32_vec().unwrap();
            got.iter_mut().zip(before).for_each(|(x, before)| *x -= before);
        }
        let off = relative_error(&want, &got);
        let bound = match self.packs.weights[0].quantisation() {
            None => 3e-3,
            Some(weights) if weights.scheme == q4k() => 1.2e-2,
            Some(_) => 5e-3,
        };
        assert!(off < bound, "{what}: off by {off}");
    }

    /// Runs the layer watched and not watched, and compares choices and sums with the definition.
    fn check(&self, what: &str) -> Buffer {
        let case = &self.case;
        let what = format!(
            "{what}: {:?}, {} tokens, {} of {} experts and {} shared, adds: {}",
            self.packs.weights[0].scheme(),
            case.tokens(),
            case.top_k,
            case.experts,
            case.shared,
            self.gain.is_some()
        );
        assert!(self.fits(), "{what}: the plan chooses another launch");
        let (chosen, got) = self.run(true);
        let (ids, weights) = case.expect(&what, &self.rows(), &chosen);
        self.assert_sums(&what, &ids, &weights, &got);
        assert_same(&format!("{what}, not watched"), &got, &self.run(false).1);
        got
    }
}

impl Layer<'_> {
    /// Fails unless each token of this layer of four, which adds, has the same bits with fewer neighbours.
    fn check_parts(&self, what: &str) {
        let gain = self.gain.as_ref().unwrap();
        let all = self.check(&format!("{what}: four tokens"));
        for (start, end) in [(0, 1), (3, 4), (0, 2), (2, 4), (1, 4)] {
            let part = Layer {
                case: self.case.of_rows(start, end - start),
                packs: self.packs,
                gain: Some(cut(gain, 0, gain.dims()[0])),
                map: None,
            };
            assert_same(
                &format!("{what}: tokens {start} to {end}"),
                &cut(&all, start, end - start),
                &part.run(false).1,
            );
        }
    }
}

/// The sizes of a layer: [E, K] and [H, I].
type Sizes = ([usize; 2], [usize; 2]);

/// Sizes in floats and, for a few schemes, in integers and FP8.
fn layers() -> Vec<(Option<QuantScheme>, Sizes)> {
    let floats = [
        ([8, 2], [64, 64]),
        ([16, 4], [320, 192]),
        ([60, 6], [1024, 448]),
        ([5, 1], [576, 1344]),
        ([40, 3], [128, 2560]),
        ([200, 4], [1024, 128]),
        ([8, 8], [2048, 768]),
    ];
    let [mxfp4, nvfp4] = fp4();
    let block = fp8(QuantGroup::Block { n: 128, k: 128 });
    let schemes = [int(4, 128, false, false), int(8, 0, true, false), block, mxfp4, nvfp4, q4k()];
    let quantised = [([12, 3], [128, 128]), ([6, 2], [384, 256]), ([16, 8], [1024, 384])];
    let quantised = quantised.into_iter().flat_map(|sizes| schemes.map(|scheme| (Some(scheme), sizes)));
    // gpt-oss has rows of 22.5 steps.
    let odd = [([7, 2], [2880, 192]), ([7, 2], [192, 2880])];
    let odd = odd.into_iter().flat_map(|sizes| [mxfp4, nvfp4, q4k()].map(|scheme| (Some(scheme), sizes)));
    let all = floats.map(|sizes| (None, sizes)).into_iter().chain(quantised).chain(odd);
    // The case with 8 experts is never left out: its experts fill the launch's ring of stages more than once.
    small(all, 200_000, |(_, (experts, dims))| if experts[0] == 8 { 0 } else { dims[0] * dims[1] })
}

#[test]
fn one_launch_computes_the_layer_of_a_few_tokens() {
    let mut rng = Rng::new();
    for (scheme, ([experts, top_k], dims)) in layers() {
        let packs = Packs::new(&mut rng, experts, dims, scheme);
        for tokens in (1..=4).filter(|tokens| tokens * top_k <= 32) {
            for is_stored in [false, true] {
                let sizes = [tokens, experts, top_k];
                Layer::new(&mut rng, Rule::all()[0], sizes, &packs, is_stored).check("the usual rule");
            }
        }
    }
}

#[test]
fn one_launch_routes_by_every_rule() {
    let mut rng = Rng::new();
    for (scheme, ([experts, top_k], dims)) in layers().into_iter().filter(|layer| layer.1.1[0] <= 384) {
        let shared = Packs::new(&mut rng, experts + 2, dims, scheme);
        let packs = Packs::new(&mut rng, experts, dims, scheme);
        for rule in Rule::all() {
            let new =
                |rng: &mut Rng, tokens, packs| Layer::new(rng, rule, [tokens, experts, top_k], packs, false);
            new(&mut rng, 2, &packs).check(&format!("{rule:?}"));
            let mut with_shared = new(&mut rng, 2, &shared);
            with_shared.case.shared = 2;
            with_shared.check(&format!("{rule:?}, shared"));
        }
        for (tokens, valid) in [(1, 0), (3, 0), (3, 2)] {
            let mut padded =
                Layer::new(&mut rng, Rule::all()[0], [tokens, experts, top_k], &packs, tokens == 1);
            padded.case.valid = Some(valid);
            padded.check(&format!("{valid} valid rows"));
        }
        for weights in [ForcedWeights::OfForced, ForcedWeights::OfChosen] {
            let mut forced = Layer::new(&mut rng, Rule::all()[0], [4, experts, top_k], &packs, true);
            forced.case.force(&mut rng, weights);
            forced.check(&format!("forced {weights:?}"));
        }
        // Every other expert is on another rank.
        let here = experts.div_ceil(2);
        let some = Packs::new(&mut rng, here, dims, scheme);
        let slot = |id: usize| if id.is_multiple_of(2) { (here - 1 - id / 2) as i32 } else { -1 };
        let mut mapped = Layer::new(&mut rng, Rule::all()[0], [4, experts, top_k], &some, false);
        mapped.map = Some((0..experts).map(slot).collect());
        mapped.check("half elsewhere");
    }
}

/// Experts with biases, the clamped activation, or both; the rule of gpt-oss and the other ones.
#[test]
fn one_launch_computes_experts_with_biases() {
    let mut rng = Rng::new();
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 7.0 };
    let sizes: [Sizes; 5] = [
        ([8, 2], [64, 64]),
        ([32, 4], [320, 192]),
        ([150, 4], [576, 448]),
        ([8, 8], [2048, 768]),
        ([6, 4], [2880, 2880]),
    ];
    for (at, ([experts, top_k], dims)) in
        small(sizes, 200_000, |(experts, dims)| if experts[0] == 8 { 0 } else { dims[0] * dims[1] })
            .into_iter()
            .enumerate()
    {
        let biased = [[true, true], [true, false], [false, true]][at % 3];
        let activation = if at == 3 { Activation::SwiGlu } else { oai };
        let packs = Packs::new(&mut rng, experts, dims, None).with_epilogue(&mut rng, biased, activation);
        for tokens in (1..=4).filter(|tokens| tokens * top_k <= 32) {
            for is_stored in [false, true] {
                let sizes = [tokens, experts, top_k];
                Layer::new(&mut rng, Rule::gpt_oss(), sizes, &packs, is_stored).check("the rule of gpt-oss");
            }
        }
        for rule in Rule::all() {
            Layer::new(&mut rng, rule, [2, experts, top_k], &packs, false).check(&format!("{rule:?}"));
        }
        let mut forced = Layer::new(&mut rng, Rule::gpt_oss(), [4, experts, top_k], &packs, true);
        forced.case.force(&mut rng, ForcedWeights::OfForced);
        forced.check("forced");
        // Every other expert is on another rank.
        let here = experts.div_ceil(2);
        let some = Packs::new(&mut rng, here, dims, None).with_epilogue(&mut rng, biased, activation);
        let slot = |id: usize| if id.is_multiple_of(2) { (here - 1 - id / 2) as i32 } else { -1 };
        let mut mapped = Layer::new(&mut rng, Rule::gpt_oss(), [4, experts, top_k], &some, false);
        mapped.map = Some((0..experts).map(slot).collect());
        mapped.check("half elsewhere");
        let whole = Layer::new(&mut rng, Rule::gpt_oss(), [4, experts, top_k], &packs, false);
        whole.check_parts("biases");
    }
}

/// A softmax over a NaN chooses nothing. Other scores choose among the experts without a NaN, which are fewer than a
/// token may have.
#[test]
fn one_launch_chooses_no_nan() {
    let mut rng = Rng::new();
    for (scheme, ([experts, top_k], dims)) in layers().into_iter().filter(|layer| layer.1.1[0] <= 384) {
        let packs = Packs::new(&mut rng, experts, dims, scheme);
        for (rule, left) in [(Rule::all()[0], 0), (Rule::all()[4], 1), (Rule::all()[4], 2)] {
            for tokens in [1, 2] {
                let mut layer = Layer::new(&mut rng, rule, [tokens, experts, top_k], &packs, true);
                let mut gate = values::<bf16>(&layer.case.gate);
                // One NaN is enough for a softmax.
                gate[if left == 0 { (experts - 1) * dims[0] } else { left * dims[0] }..].fill(bf16::NAN);
                layer.case.gate = Buffer::from_vec(gate, &[experts, dims[0]]).unwrap();
                let (chosen, got) = layer.run(true);
                let logits = product(&layer.rows(), &layer.case.gate.view().to_f32_vec().unwrap(), dims[0]);
                let mut weights = Vec::new();
                for (row, logits) in chosen.chunks(top_k).zip(logits.chunks(experts)) {
                    let (some, none) = row.split_at(left.min(top_k));
                    let mut some = some.to_vec();
                    some.sort_unstable();
                    assert!(some.iter().copied().eq(0..some.len() as u32), "{rule:?}, {left} left: {row:?}");
                    assert!(none.iter().all(|id| *id == NO_EXPERT), "{rule:?}, {left} left: {row:?}");
                    let values: Vec<f64> = rule.values(logits);
                    weights.extend(rule.weights(&values, row));
                }
                layer.assert_sums(&format!("{rule:?}, {left} left"), &chosen, &weights, &got);
            }
        }
    }
}

/// A token has the same bits alone as next to others.
#[test]
fn a_token_of_one_launch_does_not_depend_on_its_neighbours() {
    let mut rng = Rng::new();
    for (scheme, ([experts, top_k], dims)) in layers() {
        let packs = Packs::new(&mut rng, experts, dims, scheme);
        let whole = Layer::new(&mut rng, Rule::all()[0], [4, experts, top_k], &packs, false);
        whole.check_parts(&format!("{scheme:?}"));
    }
}
