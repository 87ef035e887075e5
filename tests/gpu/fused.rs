//! Expert layers with given ids, by each kernel that the plan can choose, compared with their definition.

use candle_core::DType;
use moe_kernels::cuda::{ExpertLists, FusedExperts, Graph, fused_experts_into};
use moe_kernels::plan::{ColumnOrder, ExpertsCall, ExpertsForm, Form, Fp8Activations};
use moe_kernels::{Buffer, Exec, NO_EXPERT, QuantGroup, QuantScheme, quantised_to_fp8};

use crate::common::*;
use crate::definition::{Operand, relative_error};
use crate::packs::{Packs, Routing, routings};
use crate::quant::matrices::{fp4, fp8, int, q4k};
use crate::quant::order;

/// A step over experts.
struct Step<'a> {
    packs: &'a Packs,
    x: Buffer,
    weights: Buffer,
    routing: Routing,
    top_k: usize,
}

impl Step<'_> {
    /// The local id of each slot's expert; NO_EXPERT for an expert on another rank.
    fn local_ids(&self) -> Vec<u32> {
        let local = |id: &u32| match &self.routing.map {
            Some(map) => {
                map.get(*id as usize).and_then(|slot| u32::try_from(*slot).ok()).unwrap_or(NO_EXPERT)
            }
            None => *id,
        };
        self.routing.ids.iter().map(local).collect()
    }

    fn call(&self) -> ExpertsCall {
        let [w13, w2] = &self.packs.weights;
        let num_local = self.packs.meaning.weights.len();
        ExpertsCall {
            tokens: self.x.dims()[0],
            top_k: self.top_k,
            num_ids: self.routing.map.as_ref().map_or(num_local, Vec::len),
            num_local,
            hidden: self.packs.meaning.hidden,
            inter: self.packs.inter,
            quant: w13.quantisation().zip(w2.quantisation()).map(Into::into),
            passes: 1,
            epilogue: self.packs.epilogue_call(),
        }
    }

    /// The slots of each expert in random order. Entries after the last slot are not slots.
    fn shuffled_lists(&self, rng: &mut Rng) -> [Buffer; 2] {
        let experts = self.packs.meaning.weights.len();
        let local = self.local_ids();
        let mut counts = vec![0; experts];
        let mut slots = vec![u32::MAX; experts * local.len()];
        for slot in rng.permutation(local.len()) {
            if let Some(count) = counts.get_mut(local[slot as usize] as usize) {
                slots[local[slot as usize] as usize * local.len() + *count as usize] = slot;
                *count += 1;
            }
        }
        [words(counts, &[experts]), words(slots, &[experts, local.len()])]
    }

    /// Prepares the launches and passes them to `repeat`, with their output.
    fn with_launch(
        &self,
        dtype: DType,
        lists: Option<&[Buffer; 2]>,
        p: &mut Place,
        repeat: impl Fn(&FusedExperts, &mut Placed, &mut Exec),
    ) -> Buffer {
        let x = p.put(&self.x);
        let weights = p.put(&self.weights);
        let ids = p.put(&words(self.routing.ids.clone(), self.weights.dims()));
        let map = self.routing.map.as_ref().map(|map| Buffer::from_vec(map.clone(), &[map.len()]).unwrap());
        let map = p.put_some(map.as_ref());
        let lists = lists.map(|lists| lists.each_ref().map(|list| p.put(list)));
        let [w13, w2] = self.packs.weights.each_ref().map(|weight| weight.read().unwrap());
        let args = FusedExperts {
            x: x.view(),
            w13: w13.view().unwrap(),
            w2: w2.view().unwrap(),
            topk_ids: ids.view(),
            topk_weights: weights.view(),
            expert_map: view_of(&map),
            lists: lists
                .as_ref()
                .map(|[counts, slots]| ExpertLists { counts: counts.view(), slots: slots.view() }),
            epilogue: self.packs.epilogue(),
        };
        let mut out = p.out(dtype, self.x.dims());
        fused_experts_into(&args, out.view_mut(), &mut p.ex).unwrap();
        repeat(&args, &mut out, &mut p.ex);
        out.host(p)
    }

    fn sums(&self, dtype: DType, lists: Option<&[Buffer; 2]>, p: &mut Place) -> Buffer {
        self.with_launch(dtype, lists, p, |_, _, _| {})
    }

    /// The same step with only the first tokens.
    fn first(&self, tokens: usize) -> Self {
        let Routing { name, ids, map } = &self.routing;
        let ids = ids[..tokens * self.top_k].to_vec();
        let routing = Routing { name, ids, map: map.clone() };
        Self {
            packs: self.packs,
            x: cut(&self.x, 0, tokens),
            weights: cut(&self.weights, 0, tokens),
            routing,
            top_k: self.top_k,
        }
    }
}

/// A form, the numbers of experts, K, H and I, and a number of tokens for which the plan chooses this form.
pub type Case = (ExpertsForm, [usize; 4], usize);

/// The properties of a form: the bound of its relative error, whether a row's bits are the same among any other rows,
/// and whether it reads lists of slots.
struct Promise {
    bound: f64,
    operand: Operand,
    alone: bool,
    lists: bool,
}

impl Promise {
    fn of(form: ExpertsForm, scheme: Option<QuantScheme>, invariant: bool) -> Self {
        use ExpertsForm::{Fp8, OneLaunch, QuantAny, Tensor, Wide};
        let quant = scheme.is_some();
        // The errors: f32 sums, and activations that may round to the other bf16; rows in bf16; weights that are
        // rounded to bf16, too.
        let bound = match (form, quant) {
            (Wide | QuantAny, true) => 1.2e-2,
            // An activation between two numbers of E4M3, which are 1/16 apart, may round to the other one. Products of
            // activations that are not quantised are off by about 2.5e-2.
            (Fp8, _) => 1.5e-2,
            // Its weights, rounded once, and its scales are off by 0.24 % in each product, and an output has three.
            (_, true) if scheme == Some(q4k()) => 1.2e-2,
            (_, true) => 5e-3,
            (Wide, false) => 4e-3,
            _ => 3e-3,
        };
        // With integer weights, experts with few rows on average are computed in another way.
        let alone = matches!(form, OneLaunch | Wide | Fp8) || form == Tensor && (invariant || !quant);
        let operand: Operand = if form == Fp8 { quantised_to_fp8 } else { <[f32]>::to_vec };
        Self { bound, operand, alone, lists: matches!(form, Tensor | Wide | Fp8) }
    }
}

/// Compares a step by every kind of routing with the definition.
pub fn check(rng: &mut Rng, case: Case, packs: &Packs, ex: &Exec) {
    let (form, [experts, top_k, hidden, _], tokens) = case;
    let scheme = packs.weights[0].quantisation().map(|weights| weights.scheme);
    let mut p = Place::new(ex.clone());
    for routing in routings(rng, tokens, top_k, experts) {
        let x = rng.floats(DType::BF16, &[tokens, hidden]);
        let weights = rng.floats(DType::F32, &[tokens, top_k]);
        let step = Step { packs, x, weights, routing, top_k };
        let name = format!("{case:?} {:?} {}", packs.weights[0].scheme(), step.routing.name);
        let chosen = ExpertsForm::choose(&step.call(), &ex.machine()).unwrap();
        // If some experts are on other ranks, the local experts have fewer rows.
        assert!(chosen == form || step.routing.map.is_some(), "{name}: the plan chooses {chosen:?}");
        let promise = Promise::of(chosen, scheme, ex.batch_invariant());
        let [x, weights] = [&step.x, &step.weights].map(|b| b.view().to_f32_vec().unwrap());
        let want = packs.meaning.sums(&x, &step.local_ids(), &weights, promise.operand);
        let got = step.sums(DType::F32, None, &mut p);
        let off = relative_error(&want, &got.view().to_f32_vec().unwrap());
        assert!(off < promise.bound, "{name}: off by {off}");
        assert_same(&format!("{name} again"), &got, &step.sums(DType::F32, None, &mut p));
        let rounded = got.view().to_f32_vec().unwrap().into_iter().map(moe_kernels::half::bf16::from_f32);
        let rounded = Buffer::from_vec(rounded.collect(), got.dims()).unwrap();
        let in_bf16 = step.sums(DType::BF16, None, &mut p);
        if chosen == ExpertsForm::OneLaunch {
            let off = relative_error(&want, &in_bf16.view().to_f32_vec().unwrap());
            assert!(off < promise.bound.max(6e-3), "{name} in bf16: off by {off}");
        } else {
            assert_same(&format!("{name} in bf16"), &rounded, &in_bf16);
        }
        if promise.lists {
            let lists = step.shuffled_lists(rng);
            assert_same(&format!("{name} listed"), &got, &step.sums(DType::F32, Some(&lists), &mut p));
        }
        if step.routing.name == "spread" {
            check_rows(rng, &name, &step, (form, &promise), &got, &mut p);
        }
    }
}

/// Rows alone, next to a row of NaN, and from a graph.
fn check_rows(
    rng: &mut Rng,
    name: &str,
    step: &Step,
    (form, promise): (ExpertsForm, &Promise),
    whole: &Buffer,
    p: &mut Place,
) {
    let tokens = step.x.dims()[0];
    for few in [1, 5, 40, tokens / 2, tokens - 1] {
        let first = step.first(few.min(tokens));
        let same = ExpertsForm::choose(&first.call(), &p.ex.machine()) == Some(form);
        if promise.alone && few > 0 && same {
            let whole = cut(whole, 0, few.min(tokens));
            let alone = first.sums(DType::F32, None, p);
            assert_same(&format!("{name}: the first {few} rows alone"), &whole, &alone);
        }
    }
    let replayed = step.with_launch(DType::F32, None, p, |args, out, ex| {
        let mut graph = Graph::capture(ex, |ex| fused_experts_into(args, out.view_mut(), ex)).unwrap();
        for _ in 0..3 {
            ex.copy_from_host(poisoned(DType::F32, whole.dims()).view(), out.view_mut()).unwrap();
            graph.launch().unwrap();
        }
        ex.synchronize().unwrap();
    });
    assert_same(&format!("{name} from a graph"), whole, &replayed);
    let lost = rng.below(tokens);
    let hidden = step.x.dims()[1];
    let mut x = values::<moe_kernels::half::bf16>(&step.x);
    x[lost * hidden + rng.below(hidden)] = moe_kernels::half::bf16::NAN;
    let mut step = step.first(tokens);
    step.x = Buffer::from_vec(x, &[tokens, hidden]).unwrap();
    let got = step.sums(DType::F32, None, p).view().to_f32_vec().unwrap();
    let whole = whole.view().to_f32_vec().unwrap();
    for (t, (got, want)) in got.chunks(hidden).zip(whole.chunks(hidden)).enumerate() {
        let as_it_was = got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits());
        let is_lost = got.iter().all(|x| x.is_nan());
        assert!(
            if t == lost { is_lost } else { as_it_was },
            "{name}: row {t} next to row {lost}, which is NaN"
        );
    }
}

/// The number of multiplications of a case, by which small cases are chosen. Cases of 8 experts are always chosen; they
/// fill every ring of stages.
pub fn work((_, [experts, top_k, hidden, inter], tokens): &Case) -> usize {
    if *experts == 8 { 0 } else { tokens * top_k * hidden * inter }
}

#[test]
fn experts_in_bf16_are_those_of_their_definition() {
    use ExpertsForm::{Grouped, OneLaunch, Stream, Tensor, Wide};
    let mut rng = Rng::new();
    let cases: [(bool, Case); 20] = [
        (false, (OneLaunch, [8, 2, 64, 64], 1)),
        (false, (OneLaunch, [8, 8, 2048, 768], 1)),
        (false, (OneLaunch, [60, 6, 1024, 448], 4)),
        (false, (OneLaunch, [5, 1, 576, 1344], 3)),
        (false, (OneLaunch, [40, 3, 128, 2560], 2)),
        (false, (Stream, [8, 2, 64, 64], 7)),
        (false, (Stream, [8, 8, 2048, 768], 5)),
        (false, (Stream, [16, 4, 320, 192], 5)),
        (false, (Stream, [24, 8, 2048, 768], 6)),
        // This has more experts than the tables of the other kernels can hold.
        (false, (Stream, [2100, 4, 64, 64], 200)),
        (false, (Grouped, [2100, 4, 64, 64], 600)),
        (false, (Tensor, [8, 2, 64, 64], 40)),
        (false, (Tensor, [16, 4, 320, 192], 17)),
        (false, (Tensor, [24, 8, 2048, 768], 64)),
        (true, (Tensor, [60, 6, 1024, 448], 40)),
        (true, (Tensor, [5, 1, 576, 1344], 3)),
        (false, (Wide, [8, 2, 64, 64], 300)),
        (false, (Wide, [16, 4, 320, 192], 330)),
        (false, (Wide, [5, 1, 576, 1344], 257)),
        (false, (Wide, [24, 8, 1024, 448], 200)),
    ];
    for (invariant, case) in small(cases, 3 << 20, |(_, case)| work(case)) {
        let [experts, _, hidden, inter] = case.1;
        let packs = Packs::new(&mut rng, experts, [hidden, inter], None);
        check(&mut rng, case, &packs, &cuda().with_batch_invariant(invariant));
    }
}

#[test]
fn quantised_experts_are_those_of_their_definition() {
    use ExpertsForm::{OneLaunch, QuantAny, Stream, Tensor, Wide};
    let mut rng = Rng::new();
    let forms: [(bool, ExpertsForm, usize, usize); 9] = [
        (false, OneLaunch, 3, 1),
        (false, OneLaunch, 3, 4),
        (false, Stream, 9, 4),
        // Rows are multiplied as digits, and an expert has more rows than a tile.
        (false, Tensor, 3, 6),
        (false, Tensor, 3, 9),
        (false, Tensor, 3, 70),
        (true, Tensor, 3, 40),
        (true, Tensor, 3, 1),
        (false, Wide, 3, 300),
    ];
    let [mxfp4, nvfp4] = fp4();
    let schemes: [QuantScheme; 11] = [
        int(4, 128, false, false),
        q4k(),
        mxfp4,
        int(4, 32, true, false),
        int(4, 0, false, false),
        int(8, 64, true, false),
        int(8, 0, true, false),
        nvfp4,
        fp8(QuantGroup::Block { n: 128, k: 128 }),
        fp8(QuantGroup::Channel),
        fp8(QuantGroup::Tensor),
    ];
    for [hidden, inter] in small([[128, 128], [384, 256], [1024, 384]], 128, |size| size[0]) {
        for scheme in schemes.into_iter().step_by(if tiny() { 3 } else { 1 }) {
            let packs = Packs::new(&mut rng, 12, [hidden, inter], Some(scheme));
            for (invariant, form, top_k, tokens) in small(forms, 9, |form| form.3) {
                let case = (form, [12, top_k, hidden, inter], tokens);
                check(&mut rng, case, &packs, &cuda().with_batch_invariant(invariant));
            }
        }
        // Some experts have their activations in their own order, too.
        let packs = Packs::new(&mut rng, 12, [hidden, inter], Some(int(4, 64, true, true)));
        for tokens in small([1, 9, 70], 9, |tokens| *tokens) {
            check(&mut rng, (QuantAny, [12, 3, hidden, inter], tokens), &packs, &cuda());
        }
    }
}

/// Each expert may have its own order of the rows' columns, and its activations are in the order of down's columns.
#[test]
fn experts_take_rows_in_their_own_orders() {
    use ExpertsForm::{Tensor, Wide};
    let mut rng = Rng::new();
    for dims in small([(128, 128), (384, 256)], 128, |dims| dims.0) {
        for scheme in order::schemes() {
            let packs = order::Experts::new(&mut rng, dims, scheme).with_meaning();
            let quant = packs.weights.each_ref().map(|weight| weight.quantisation().unwrap());
            assert_eq!(quant.map(|of| of.order), [ColumnOrder::Sorted, ColumnOrder::Input], "{}", scheme.0);
            let scales = if scheme.1 { DType::BF16 } else { DType::F16 };
            assert_eq!(quant.map(|of| of.scales), [scales; 2], "{}", scheme.0);
            for (form, tokens) in
                small([(Tensor, 1), (Tensor, 9), (Tensor, 70), (Wide, 300)], 9, |form| form.1)
            {
                let case = (form, [order::EXPERTS, order::TOP_K, dims.0, dims.1], tokens);
                check(&mut rng, case, &packs, &cuda());
            }
        }
    }
}

/// Weights and activations in FP8.
#[test]
fn experts_in_fp8_are_those_of_their_definition() {
    let mut rng = Rng::new();
    let ex = cuda().with_fp8_activations(Fp8Activations::On);
    let shapes = [([8, 2, 128, 128], 140), ([16, 4, 384, 256], 330), ([5, 1, 640, 1408], 257)];
    for ([experts, top_k, hidden, inter], tokens) in small(shapes, 128, |shape| shape.0[2]) {
        for scales in [QuantGroup::Block { n: 128, k: 128 }, QuantGroup::Channel, QuantGroup::Tensor] {
            let packs = Packs::new(&mut rng, experts, [hidden, inter], Some(fp8(scales)));
            let case = (ExpertsForm::Fp8, [experts, top_k, hidden, inter], tokens);
            check(&mut rng, case, &packs, &ex);
        }
    }
}

/// Experts of 1 to 600 rows in one launch, which covers every height of a tile and every end of one.
#[test]
fn tiles_of_every_height_are_computed() {
    let mut rng = Rng::new();
    let step = if tiny() { 21 } else { 7 };
    let counts: Vec<usize> = (1..if tiny() { 130 } else { 600 }).step_by(step).collect();
    let block = fp8(QuantGroup::Block { n: 128, k: 128 });
    let schemes =
        [None, Some(int(4, 128, false, false)), Some(block), Some(fp4()[0]), Some(fp4()[1]), Some(q4k())];
    for [hidden, inter] in small([[128, 128], [512, 256]], 128, |size| size[0]) {
        for scheme in schemes {
            let packs = Packs::new(&mut rng, counts.len(), [hidden, inter], scheme);
            let of_expert = counts.iter().enumerate().flat_map(|(e, n)| vec![e as u32; *n]);
            let ids: Vec<u32> = of_expert.collect();
            let order = rng.permutation(ids.len());
            let ids: Vec<u32> = order.into_iter().map(|at| ids[at as usize]).collect();
            let tokens = ids.len();
            let x = rng.floats(DType::BF16, &[tokens, hidden]);
            let weights = rng.floats(DType::F32, &[tokens, 1]);
            let routing = Routing { name: "every height", ids, map: None };
            let step = Step { packs: &packs, x, weights, routing, top_k: 1 };
            for ex in [cuda(), cuda().with_batch_invariant(true)] {
                let form = ExpertsForm::choose(&step.call(), &ex.machine()).unwrap();
                let promise = Promise::of(form, scheme, ex.batch_invariant());
                let [x, weights] = [&step.x, &step.weights].map(|b| b.view().to_f32_vec().unwrap());
                let want = packs.meaning.sums(&x, &step.routing.ids, &weights, promise.operand);
                let got = step.sums(DType::F32, None, &mut Place::new(ex)).view().to_f32_vec().unwrap();
                let off = relative_error(&want, &got);
                assert!(off < promise.bound, "{form:?} {scheme:?} H {hidden}: off by {off}");
            }
        }
    }
}
