//! Routers inside of launches, compared with the definition of their rules: alone (`gate_route`), and in the launch
//! that computes the whole layer of a few tokens.

mod rule;

use candle_core::DType;
use moe_kernels::cuda::{LastStep, StepTokens, balance_ids_into, gate_route_into, upload_step_into};
use moe_kernels::half::bf16;
use moe_kernels::{Buffer, Exec, ForcedWeights, Gate, GateGroups, LayerRouting, NO_EXPERT, View};

use crate::common::*;
use crate::definition::{product, relative_error};
pub use rule::Rule;

/// A gate, its input rows, and the choices that are forced on it.
pub struct Case {
    pub rule: Rule,
    pub experts: usize,
    pub top_k: usize,
    pub shared: usize,
    pub rows: Buffer,
    pub gate: Buffer,
    gate_bias: Buffer,
    correction: Buffer,
    /// Rows from this index on are padding.
    pub valid: Option<usize>,
    pub forced: Option<(Buffer, ForcedWeights)>,
}

/// Experts that a choice may have.
struct Kept {
    experts: Vec<u32>,
    /// Whether rounding decides which groups are kept.
    is_open: bool,
}

const SHARED_WEIGHT: f32 = 0.75;
/// Number of MoE layers in the arrays of a step, and the layer that is computed.
const LAYERS: usize = 3;
const LAYER: usize = 1;

impl Case {
    pub fn new(rng: &mut Rng, rule: Rule, rows: Buffer, experts: usize, top_k: usize) -> Self {
        let hidden = rows.dims()[1];
        // Logits have a magnitude of a few units.
        let by = 4.0 * (hidden as f32).powf(-0.5);
        let scaled = |rng: &mut Rng, dims: &[usize], by: f32| -> Vec<f32> {
            (0..dims.iter().product()).map(|_| rng.float() * by).collect()
        };
        let narrow = |values: Vec<f32>, dims: &[usize]| {
            Buffer::from_vec(values.into_iter().map(bf16::from_f32).collect(), dims).unwrap()
        };
        let gate = narrow(scaled(rng, &[experts, hidden], by), &[experts, hidden]);
        let gate_bias = narrow(scaled(rng, &[experts], 1.0), &[experts]);
        let correction = Buffer::from_vec(scaled(rng, &[experts], 0.2), &[experts]).unwrap();
        Self { rule, experts, top_k, shared: 0, rows, gate, gate_bias, correction, valid: None, forced: None }
    }

    pub fn tokens(&self) -> usize {
        self.rows.dims()[0]
    }

    /// The same gate for some of the rows.
    pub fn of_rows(&self, first: usize, count: usize) -> Self {
        let all = |b: &Buffer| cut(b, 0, b.dims()[0]);
        Self {
            rows: cut(&self.rows, first, count),
            gate: all(&self.gate),
            gate_bias: all(&self.gate_bias),
            correction: all(&self.correction),
            forced: None,
            ..*self
        }
    }

    /// Forces random choices on every row but each third one, which is free; one slot of row 1 is absent. With weights
    /// of an even spread, all rows are forced.
    pub fn force(&mut self, rng: &mut Rng, weights: ForcedWeights) {
        let experts = self.experts;
        let top_k = self.top_k;
        let row = |t: usize| {
            let mut ids = rng.permutation(experts)[..top_k].to_vec();
            if weights == ForcedWeights::OfForced && t.is_multiple_of(3) {
                ids.fill(NO_EXPERT);
            } else if weights == ForcedWeights::OfForced && t == 1 {
                ids[top_k / 2] = NO_EXPERT;
            }
            // The choices that are forced on the other layers of the step differ.
            let mut all = vec![0; LAYERS * top_k];
            all[LAYER * top_k..][..top_k].copy_from_slice(&ids);
            all
        };
        let ids = (0..self.tokens()).flat_map(row).collect();
        self.forced = Some((words(ids, &[self.tokens() * LAYERS * top_k]), weights));
    }

    /// Runs `launch` with this gate. If it is watched, also returns the choices that the launch wrote to the step's
    /// array and to the counts of experts.
    pub fn with_gate(
        &self,
        is_watched: bool,
        p: &mut Place,
        launch: impl FnOnce(&Gate, &mut Place),
    ) -> Vec<u32> {
        if let Some(valid) = self.valid {
            upload_valid_rows(valid, &p.ex);
        }
        let gate = p.put(&self.gate);
        let gate_bias = p.put(&self.gate_bias);
        let correction = p.put(&self.correction);
        let len = self.tokens() * LAYERS * self.top_k;
        let routed = p.out(DType::U32, &[len]);
        // The counters wrap around at one of the next three choices.
        let heat = p.put(&words(vec![u32::MAX - 2; self.experts], &[self.experts]));
        let forced = self.forced.as_ref().map(|(ids, weights)| (p.put(ids), *weights));
        let gate = Gate {
            weight: gate.view(),
            bias: self.rule.has_gate_bias.then(|| gate_bias.view()),
            correction_bias: self.rule.biased.then(|| correction.view()),
            top_k: self.top_k,
            shared: self.shared,
            shared_weight: SHARED_WEIGHT,
            scoring: self.rule.scoring,
            raw_logits: self.rule.raw,
            groups: self.rule.groups_of(self.experts, self.top_k),
            renormalize: self.rule.renormalize,
            scale: self.rule.scale,
            softcap: self.rule.softcap,
            padded: self.valid.is_some(),
            routing: LayerRouting {
                heat: is_watched.then(|| heat.view()),
                routed: is_watched.then(|| self.of_layer(&routed)),
                forced: forced.as_ref().map(|(ids, weights)| (self.of_layer(ids), *weights)),
                stride: LAYERS * self.top_k,
            },
            log2phy: None,
        };
        launch(&gate, p);
        if !is_watched {
            return Vec::new();
        }
        let live = self.valid.unwrap_or(self.tokens());
        let mut chosen = Vec::new();
        for (at, id) in values::<u32>(&routed.host(p)).into_iter().enumerate() {
            let row = at / (LAYERS * self.top_k);
            let layer = at / self.top_k % LAYERS;
            match (layer == LAYER, row < live) {
                (true, true) => chosen.push(id),
                // The launch of a whole layer marks padding rows, which have no experts.
                (true, false) if id == NO_EXPERT => {}
                _ => assert_eq!(id, 0xdead_beef, "row {row} of layer {layer} was written"),
            }
        }
        let mut counts = vec![u32::MAX - 2; self.experts];
        for id in chosen.iter().filter(|id| **id != NO_EXPERT) {
            counts[*id as usize] = counts[*id as usize].wrapping_add(1);
        }
        assert_eq!(values::<u32>(&heat.host(p)), counts, "counts of experts");
        chosen
    }

    /// The experts of the groups that a row keeps by these keys.
    fn kept(&self, keys: &[f64], equal: f64) -> Kept {
        let experts = 0..self.experts as u32;
        let Some(GateGroups { count, kept }) = self.rule.groups_of(self.experts, self.top_k) else {
            return Kept { experts: experts.collect(), is_open: false };
        };
        let size = self.experts / count;
        let groups = self.rule.group_keys(keys, size);
        let mut best: Vec<usize> = (0..count).collect();
        best.sort_by(|a, b| groups[*b].total_cmp(&groups[*a]));
        let is_open =
            best.get(kept).is_some_and(|next| groups[best[kept - 1]] - groups[*next] <= 2.0 * equal);
        let is_kept = |expert: &u32| best[..kept].contains(&(*expert as usize / size));
        Kept { experts: experts.filter(is_kept).collect(), is_open }
    }

    /// The ids of a step, from the first id of the layer on.
    fn of_layer<'a>(&self, ids: &'a Placed) -> View<'a> {
        let len = ids.view().elem_count();
        let start = LAYER * self.top_k;
        ids.view().narrow(start, len - start).unwrap()
    }

    /// Checks the choices [live, K] for these rows of floats. Returns ids and weights [T, K + S] with padding and
    /// shared experts. A weight is NaN if its choice is not visible and depends on rounding, because two biased keys
    /// are nearly equal.
    pub fn expect(&self, what: &str, rows: &[f32], chosen: &[u32]) -> (Vec<u32>, Vec<f64>) {
        let mut ids = Vec::new();
        let mut weights = Vec::new();
        let gate = self.gate.view().to_f32_vec().unwrap();
        let mut logits = product(rows, &gate, self.rows.dims()[1]);
        if self.rule.has_gate_bias {
            let bias = self.gate_bias.view().to_f32_vec().unwrap();
            logits.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % self.experts]));
        }
        let correction = self.correction.view().to_f32_vec().unwrap();
        for (t, logits) in logits.chunks(self.experts).enumerate() {
            let Some(chosen) = chosen.chunks(self.top_k).nth(t) else {
                ids.extend(vec![NO_EXPERT; self.top_k + self.shared]);
                weights.extend(vec![0.0; self.top_k + self.shared]);
                continue;
            };
            let values = self.rule.values(logits);
            let keys = values.iter().enumerate().map(|(e, value)| match self.rule.biased {
                true => value + f64::from(correction[e]),
                false => *value,
            });
            let keys: Vec<f64> = keys.collect();
            // A choice may differ only if two keys are nearly equal.
            let equal = 2e-5 * keys.iter().fold(0f64, |most, key| most.max(key.abs()));
            let Kept { experts: mut best, is_open: open_groups } = self.kept(&keys, equal);
            best.sort_by(|a, b| keys[*b as usize].total_cmp(&keys[*a as usize]));
            let contenders = &best[..best.len().min(self.top_k + 1)];
            let is_open =
                contenders.windows(2).any(|two| keys[two[0] as usize] - keys[two[1] as usize] <= equal);
            best.truncate(self.top_k);
            let row = t * LAYERS * self.top_k + LAYER * self.top_k;
            let forced = self.forced.as_ref().map(|(ids, how)| (&values_of(ids)[row..][..self.top_k], *how));
            let mut of_weights = chosen;
            let mut is_known = true;
            match forced.filter(|(ids, _)| ids.iter().any(|id| *id != NO_EXPERT)) {
                Some((forced, how)) => {
                    let mut forced = forced.to_vec();
                    forced.sort_by_key(|id| *id == NO_EXPERT);
                    assert_eq!(chosen, forced, "{what}: forced experts of row {t}");
                    if how == ForcedWeights::OfChosen {
                        of_weights = &best;
                        is_known = !(self.rule.biased && is_open || open_groups);
                    }
                }
                None => {
                    for (got, want) in chosen.iter().zip(&best).filter(|_| !open_groups) {
                        let off = (keys[*got as usize] - keys[*want as usize]).abs();
                        assert!(off <= equal, "{what}: row {t} chose {chosen:?}, expected {best:?}");
                    }
                    let mut distinct = chosen.to_vec();
                    distinct.sort_unstable();
                    distinct.dedup();
                    assert_eq!(distinct.len(), self.top_k, "{what}: row {t} chose {chosen:?}");
                }
            }
            ids.extend(chosen);
            ids.extend(self.experts as u32..(self.experts + self.shared) as u32);
            let of_row = self.rule.weights(&values, of_weights);
            weights.extend(of_row.into_iter().map(|weight| if is_known { weight } else { f64::NAN }));
            weights.extend(vec![f64::from(SHARED_WEIGHT); self.shared]);
        }
        (ids, weights)
    }
}

fn values_of(ids: &Buffer) -> &[u32] {
    ids.view().cpu::<u32>().unwrap()
}

/// Uploads the number of valid rows of a step to the device.
fn upload_valid_rows(rows: usize, ex: &Exec) {
    let mut host = ex.pinned(4).unwrap();
    host.wait().unwrap().copy_from_slice(&[rows as u32; 4]);
    let sampled = ex.zeros(DType::U32, &[1]).unwrap();
    let mut to = ex.zeros(DType::U32, &[4]).unwrap();
    let last = LastStep { sampled: sampled.view(), read_back: None };
    upload_step_into(&mut host, last, StepTokens { ids: 0, source: 0, rows: 0 }, to.view_mut(), ex).unwrap();
    ex.synchronize().unwrap();
}

/// Runs the router alone. Its results have the same bits whether it is watched or not.
fn route(case: &Case, what: &str) {
    let mut p = Place::new(cuda());
    let tokens = case.tokens();
    let slots = case.top_k + case.shared;
    let rows = p.put(&case.rows);
    let mut out = Vec::new();
    let mut watched = Vec::new();
    for is_watched in [true, false] {
        let mut logits = p.out(DType::F32, &[tokens, case.experts]);
        let mut ids = p.out(DType::U32, &[tokens, slots]);
        let mut weights = p.out(DType::F32, &[tokens, slots]);
        let chosen = case.with_gate(is_watched, &mut p, |gate, p| {
            let logits = logits.view_mut();
            let ids = ids.view_mut();
            gate_route_into(rows.view(), gate, logits, ids, weights.view_mut(), &mut p.ex).unwrap();
        });
        if is_watched {
            watched = chosen;
        }
        out.push([logits, ids, weights].map(|placed| placed.host(&p)));
    }
    for (part, (a, b)) in ["logits", "ids", "weights"].iter().zip(out[0].iter().zip(&out[1])) {
        assert_same(&format!("{what}: watched {part}"), a, b);
    }
    let rows = case.rows.view().to_f32_vec().unwrap();
    let (ids, weights) = case.expect(what, &rows, &watched);
    assert_eq!(values::<u32>(&out[0][1]), ids, "{what}");
    let pairs = weights.into_iter().zip(values::<f32>(&out[0][2])).filter(|(want, _)| !want.is_nan());
    let (want, got): (Vec<f64>, Vec<f32>) = pairs.unzip();
    let off = relative_error(&want, &got);
    assert!(off < 2e-5, "{what}: weights are off by {off}");
}

#[test]
fn routers_choose_by_their_rules() {
    let mut rng = Rng::new();
    // Tokens, H, E, K. From 512 tokens on each part has its own launch.
    let sizes = [
        (1, 64, 1, 1),
        (3, 64, 5, 2),
        (19, 320, 60, 6),
        (5, 128, 1000, 32),
        (9, 1024, 200, 4),
        (130, 7168, 256, 8),
        (33, 512, 384, 8),
        (1024, 2048, 128, 8),
        (513, 320, 60, 6),
        (600, 128, 1000, 32),
    ];
    for (tokens, hidden, experts, top_k) in small(sizes, 1000, |size| size.0 * size.3 + size.1) {
        for rule in Rule::all() {
            let rows = rng.floats(DType::BF16, &[tokens, hidden]);
            let mut case = Case::new(&mut rng, rule, rows, experts, top_k);
            let what = format!("T={tokens} H={hidden} E={experts} K={top_k} {rule:?}");
            route(&case, &what);
            case.shared = if top_k < 32 { 2.min(32 - top_k) } else { 0 };
            case.valid = Some(tokens.saturating_sub(2));
            route(&case, &format!("{what}, shared and padded"));
            for weights in [ForcedWeights::OfForced, ForcedWeights::OfChosen] {
                case.force(&mut rng, weights);
                route(&case, &format!("{what}, forced {weights:?}"));
            }
        }
    }
}

#[test]
fn equal_experts_are_chosen_by_their_numbers() {
    let mut rng = Rng::new();
    for tokens in [20, 700] {
        let rows = rng.floats(DType::BF16, &[tokens, 256]);
        let mut case = Case::new(&mut rng, Rule::all()[0], rows, 96, 6);
        let one = values::<bf16>(&case.gate)[..256].to_vec();
        case.gate = Buffer::from_vec(one.repeat(96), &[96, 256]).unwrap();
        case.valid = Some(13);
        let mut p = Place::new(cuda());
        let x = p.put(&case.rows);
        let mut logits = p.out(DType::F32, &[tokens, 96]);
        let mut ids = p.out(DType::U32, &[tokens, 6]);
        let mut weights = p.out(DType::F32, &[tokens, 6]);
        let chosen = case.with_gate(true, &mut p, |gate, p| {
            let logits = logits.view_mut();
            let ids = ids.view_mut();
            gate_route_into(x.view(), gate, logits, ids, weights.view_mut(), &mut p.ex).unwrap();
        });
        assert_eq!(chosen, (0..6).collect::<Vec<u32>>().repeat(13));
        let weights = weights.floats(&p);
        assert!(weights[..13 * 6].iter().all(|w| (w - 1.0 / 6.0).abs() < 1e-6), "{weights:?}");
        assert!(weights[13 * 6..].iter().all(|w| *w == 0.0));
        assert!(values::<u32>(&ids.host(&p))[13 * 6..].iter().all(|id| *id == NO_EXPERT));
    }
}

/// The experts of a row are distinct. They are the same for the same seed, step and position, and differ otherwise.
#[test]
fn balanced_ids_depend_on_seed_step_and_place() {
    for (rows, layers, top_k, experts) in [(1, 1, 1, 1), (37, 3, 8, 128), (5, 2, 6, 7), (3, 1, 40, 300)] {
        let p = Place::new(cuda());
        let ids = |seed, step, place| {
            let step = p.put(&words(vec![step], &[1]));
            let mut ids = p.out(DType::U32, &[rows, layers, top_k]);
            balance_ids_into(seed, step.view(), place, experts, ids.view_mut(), &p.ex).unwrap();
            values::<u32>(&ids.host(&p))
        };
        let all = ids(7, 3, (0, 0));
        for row in all.chunks(top_k) {
            let mut distinct = row.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            assert!(distinct.len() == top_k && distinct.iter().all(|id| (*id as usize) < experts), "{row:?}");
        }
        assert_eq!(all, ids(7, 3, (0, 0)));
        if experts > 7 {
            assert!(all != ids(8, 3, (0, 0)) && all != ids(7, 4, (0, 0)));
            assert_eq!(all[layers * top_k..], ids(7, 3, (1, 0))[..(rows - 1) * layers * top_k]);
            let moved = ids(7, 3, (0, 1));
            for (row, moved) in all.chunks(layers * top_k).zip(moved.chunks(layers * top_k)) {
                assert_eq!(row[top_k..], moved[..(layers - 1) * top_k]);
            }
        }
    }
}
