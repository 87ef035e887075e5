//! Wrong arguments: each is an error that names the op, the argument, what was expected and what
//! came.

use candle_core::{DType, Result};
use moe_kernels::{
    Activation, AttentionMeta, Buffer, Exec, ExpertGroups, QkNormRope, View, add_into, add_rms_norm_into,
    embedding_into, grouped_down_into, grouped_gate_up_into, linear_into, paged_attention_into,
    qk_norm_rope_cache_into, rms_norm_into, softmax_into, weighted_sum_into,
};

use crate::common::view;

fn zeros(dtype: DType, dims: &[usize]) -> Buffer {
    Buffer::zeros(dtype, dims).unwrap()
}

fn f32s(dims: &[usize]) -> Buffer {
    zeros(DType::F32, dims)
}

#[track_caller]
fn says(result: Result<()>, parts: &[&str]) {
    let text = result.err().map(|e| e.to_string()).unwrap_or_default();
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
}

#[test]
fn linear_names_the_argument() {
    let ex = &mut Exec::cpu();
    let run = |x: &Buffer, w: &Buffer, bias: Option<&Buffer>, out: &mut Buffer, ex: &mut Exec| {
        linear_into(x.view(), w.view(), bias.map(Buffer::view), out.view_mut(), ex)
    };
    let x = f32s(&[2, 4]);
    let w = f32s(&[3, 4]);
    says(run(&f32s(&[8]), &w, None, &mut f32s(&[2, 3]), ex), &["linear", "x with 2 dimensions", "[8]"]);
    says(run(&x, &f32s(&[3, 5]), None, &mut f32s(&[2, 3]), ex), &["w with dims [3, 4]", "[3, 5]"]);
    says(run(&x, &zeros(DType::BF16, &[3, 4]), None, &mut f32s(&[2, 3]), ex), &["w of dtype f32", "bf16"]);
    says(run(&x, &w, Some(&f32s(&[2])), &mut f32s(&[2, 3]), ex), &["bias with dims [3]", "[2]"]);
    says(run(&x, &w, None, &mut f32s(&[3, 2]), ex), &["out with dims [2, 3]", "[3, 2]"]);
    says(run(&x, &w, None, &mut zeros(DType::F16, &[2, 3]), ex), &["out of dtype f32", "f16"]);
    let ids = zeros(DType::U32, &[2, 4]);
    says(run(&ids, &ids, None, &mut zeros(DType::U32, &[2, 2]), ex), &["f32, bf16 or f16", "u32"]);
}

#[test]
fn row_ops_name_the_argument() {
    let ex = &mut Exec::cpu();
    let x = f32s(&[2, 4]);
    let weight = f32s(&[4]);
    let r = rms_norm_into(x.view(), f32s(&[3]).view(), 1e-6, f32s(&[2, 4]).view_mut(), ex);
    says(r, &["rms_norm", "weight with dims [4]", "[3]"]);
    let r = rms_norm_into(x.view(), zeros(DType::BF16, &[4]).view(), 1e-6, f32s(&[2, 4]).view_mut(), ex);
    says(r, &["rms_norm", "weight", "f32", "bf16"]);
    let mut residual = f32s(&[2, 3]);
    let mut out = f32s(&[2, 4]);
    let r = add_rms_norm_into(x.view(), weight.view(), 1e-6, residual.view_mut(), out.view_mut(), ex);
    says(r, &["add_rms_norm", "residual with dims [2, 4]", "[2, 3]"]);
    says(add_into(x.view(), f32s(&[8]).view_mut(), ex), &["add", "acc with dims [2, 4]", "[8]"]);
    let r = softmax_into(zeros(DType::BF16, &[1, 2]).view(), f32s(&[1, 2]).view_mut(), ex);
    says(r, &["softmax", "x of dtype f32", "bf16"]);
    let r = embedding_into(x.view(), view(&[1u32, 2], &[2]), f32s(&[2, 4]).view_mut(), ex);
    says(r, &["embedding", "id 2 at position 1", "0..2"]);
    let r = embedding_into(x.view(), view(&[1i64], &[1]), f32s(&[1, 4]).view_mut(), ex);
    says(r, &["ids of dtype u32", "i64"]);
    let slots = f32s(&[2, 2, 3]);
    let ids = zeros(DType::U32, &[2, 2]);
    let r = weighted_sum_into(slots.view(), ids.view(), f32s(&[2, 1]).view(), f32s(&[2, 3]).view_mut(), ex);
    says(r, &["weighted_sum", "topk_weights with dims [2, 2]", "[2, 1]"]);
}

struct Experts {
    offsets: Vec<u32>,
    in_rows: Vec<u32>,
    out_rows: Vec<u32>,
}

impl Experts {
    fn new(offsets: &[u32], in_rows: &[u32], out_rows: &[u32]) -> Self {
        Self { offsets: offsets.into(), in_rows: in_rows.into(), out_rows: out_rows.into() }
    }

    fn groups(&self) -> ExpertGroups<'_> {
        ExpertGroups {
            offsets: view(&self.offsets, &[self.offsets.len()]),
            in_rows: view(&self.in_rows, &[self.in_rows.len()]),
            out_rows: view(&self.out_rows, &[self.out_rows.len()]),
        }
    }

    fn gate_up(&self, w13: &[usize]) -> Result<()> {
        let mut out = f32s(&[self.in_rows.len(), 3]);
        let x = f32s(&[2, 4]);
        let w13 = f32s(w13);
        let ex = &mut Exec::cpu();
        let x = x.view();
        let w13 = w13.view();
        grouped_gate_up_into(x, &self.groups(), w13, None, Activation::SwiGlu, out.view_mut(), ex)
    }

    fn down(&self) -> Result<()> {
        let x = f32s(&[self.in_rows.len(), 3]);
        let w2 = f32s(&[2, 4, 3]);
        let mut out = f32s(&[3, 4]);
        grouped_down_into(x.view(), &self.groups(), w2.view(), None, out.view_mut(), &mut Exec::cpu())
    }
}

#[test]
fn grouped_products_check_every_index_they_follow() {
    let good = Experts::new(&[0, 1, 2], &[0, 1, 9], &[2, 0, 9]);
    assert!(good.gate_up(&[2, 6, 4]).is_ok() && good.down().is_ok());
    says(good.gate_up(&[2, 5, 4]), &["grouped_gate_up", "even number of rows", "5"]);
    says(good.gate_up(&[2, 6, 5]), &["w13 with dims [2, 6, 4]", "[2, 6, 5]"]);
    says(good.gate_up(&[3, 6, 4]), &["offsets with dims [4]", "[3]"]);
    let descending = Experts::new(&[0, 2, 1], &[0, 1], &[0, 1]);
    says(descending.gate_up(&[2, 6, 4]), &["offsets that ascend from 0 to at most 2", "[0, 2, 1]"]);
    says(Experts::new(&[0, 1, 4], &[0, 1, 0], &[0, 1, 2]).down(), &["to at most 3", "[0, 1, 4]"]);
    says(Experts::new(&[1, 1, 2], &[0, 1], &[0, 1]).down(), &["ascend from 0"]);
    let far = Experts::new(&[0, 1, 3], &[0, 1, 2], &[0, 1, 3]);
    says(far.gate_up(&[2, 6, 4]), &["in_rows[2] is 2", "below 2"]);
    says(far.down(), &["grouped_down", "out_rows[2] is 3", "below 3"]);
    let twice = Experts::new(&[0, 1, 3], &[0, 1, 1], &[0, 1, 0]);
    says(twice.down(), &["out_rows[2] names row 0 a second time"]);
}

/// Arguments of the cache ops: 3 rows, 4 query heads, 2 KV heads, head size 6, 5 blocks of 2.
struct Cache {
    slots: Vec<u32>,
    positions: Vec<u32>,
    tables: Vec<u32>,
    bounds: Vec<u32>,
    window: Option<usize>,
    sinks: Option<&'static [f32]>,
    gates: Option<&'static [f32]>,
    heads: (usize, usize, usize),
}

impl Cache {
    fn good() -> Self {
        Self {
            slots: vec![0, 9, u32::MAX],
            positions: vec![0, 1, 5],
            tables: vec![0, 1, 4, 3, u32::MAX, 7],
            bounds: vec![0, 3, 3],
            window: None,
            sinks: None,
            gates: None,
            heads: (4, 2, 6),
        }
    }

    fn rope(&self) -> Result<()> {
        let (hq, hkv, d) = self.heads;
        let qkv = f32s(&[3, 48]);
        let angles = f32s(&[3, d / 2]);
        let mut k = f32s(&[5, 2, 2, 6]);
        let mut v = f32s(&[5, 2, 2, 6]);
        let mut q = f32s(&[3, 4, 6]);
        let args = QkNormRope {
            qkv: qkv.view(),
            q_norm: None,
            k_norm: None,
            eps: 1e-6,
            cos: angles.view(),
            sin: angles.view(),
            slot_mapping: view(&self.slots, &[self.slots.len()]),
            num_heads: hq,
            num_kv_heads: hkv,
            head_dim: d,
        };
        qk_norm_rope_cache_into(&args, q.view_mut(), k.view_mut(), v.view_mut(), &mut Exec::cpu())
    }

    fn attention(&self) -> Result<()> {
        let q = f32s(&[3, self.heads.0, 6]);
        let cache = f32s(&[5, self.heads.1, 2, 6]);
        let mut out = f32s(&[3, self.heads.0 * 6]);
        let meta = AttentionMeta {
            query_start_loc: view(&self.bounds, &[self.bounds.len()]),
            positions: view(&self.positions, &[self.positions.len()]),
            block_tables: View::new(&self.tables, &[2, self.tables.len() / 2]).unwrap(),
            scale: 1.0,
            sliding_window: self.window,
            sinks: self.sinks.map(|sinks| view(sinks, &[sinks.len()])),
            gates: self.gates.map(|gates| view(gates, &[3, gates.len() / 3])),
        };
        let ex = &mut Exec::cpu();
        paged_attention_into(q.view(), cache.view(), cache.view(), &meta, out.view_mut(), ex)
    }
}

#[test]
fn cache_ops_check_every_index_they_follow() {
    assert!(Cache::good().rope().is_ok() && Cache::good().attention().is_ok());
    let far = Cache { slots: vec![0, 10, 1], ..Cache::good() };
    says(far.rope(), &["qk_norm_rope_cache", "slot_mapping[1] is 10", "10 slots"]);
    says(Cache { heads: (4, 2, 5), ..Cache::good() }.rope(), &["even head_dim", "5"]);
    says(Cache { heads: (4, 3, 6), ..Cache::good() }.rope(), &["qkv with dims [3, 60]", "[3, 48]"]);
    says(Cache { heads: (usize::MAX, 2, 6), ..Cache::good() }.rope(), &["overflow"]);
    let bad = Cache { positions: vec![0, 1, 6], ..Cache::good() };
    says(bad.attention(), &["paged_attention", "position 6", "the 3 blocks of 2"]);
    let huge = Cache { positions: vec![0, 1, u32::MAX], ..Cache::good() };
    says(huge.attention(), &["position 4294967295"]);
    let bad = Cache { tables: vec![0, 5, 4, 3, 0, 0], ..Cache::good() };
    says(bad.attention(), &["block_tables[0][1] is 5", "5 blocks"]);
    let bad = Cache { bounds: vec![0, 4, 4], ..Cache::good() };
    says(bad.attention(), &["query_start_loc that ascends from 0 to at most 3", "[0, 4, 4]"]);
    let bad = Cache { bounds: vec![0, 2, 1], ..Cache::good() };
    says(bad.attention(), &["ascends", "[0, 2, 1]"]);
    says(Cache { window: Some(0), ..Cache::good() }.attention(), &["sliding_window of at least 1"]);
    says(Cache { sinks: Some(&[0.0; 3]), ..Cache::good() }.attention(), &["sinks with dims [4]", "[3]"]);
    says(
        Cache { gates: Some(&[0.0; 69]), ..Cache::good() }.attention(),
        &["gates with dims [3, 24]", "[3, 23]"],
    );
    says(Cache { heads: (4, 3, 6), ..Cache::good() }.attention(), &["3 key heads do not divide 4"]);
    says(Cache { positions: vec![0, 1], ..Cache::good() }.attention(), &["positions with dims [3]", "[2]"]);
}

#[test]
fn a_pool_has_a_number_of_threads_that_a_machine_can_have() {
    for n in [0, Exec::MAX_THREADS + 1, usize::MAX] {
        let error = Exec::cpu().with_threads(n).err().unwrap().to_string();
        assert!(error.contains(&format!("expected 1 to 4096, got {n}")), "{error}");
    }
}
