//! Head norm, rotation, the write to the cache, and paged attention over the cache that they wrote.

use candle_core::DType;
use moe_kernels::plan::{AttentionCall, Form, Gpu, Machine, MixedCall, MixedForm};
use moe_kernels::{
    AttentionMeta, Buffer, QkNormRope, StepRows, paged_attention_into, qk_norm_rope_cache_into,
    rope_attention_into,
};

use crate::common::*;

/// The rows of one sequence in a step: the first position and the number of rows.
pub type Sequence = (usize, usize);

pub struct Case {
    pub heads: (usize, usize),
    pub head_dim: usize,
    pub block_size: usize,
    pub window: Option<usize>,
    pub norms: bool,
    pub sinks: bool,
    /// Whether gates follow q, k and v in their rows.
    pub gates: bool,
    pub sequences: Vec<Sequence>,
    pub padding: usize,
}

pub struct Data {
    pub rows: usize,
    qkv: Buffer,
    pub norms: Option<(Buffer, Buffer)>,
    cos: Buffer,
    sin: Buffer,
    pub slots: Buffer,
    pub caches: [Buffer; 2],
    starts: Buffer,
    positions: Buffer,
    pub tables: Buffer,
    sinks: Option<Buffer>,
}

/// The inputs of an op, on a device.
pub struct Given {
    floats: [Placed; 3],
    norms: [Option<Placed>; 2],
    words: [Placed; 4],
    sinks: Option<Placed>,
}

impl Data {
    pub fn placed(&self, p: &Place) -> Given {
        let norms = self.norms.as_ref();
        Given {
            floats: [&self.qkv, &self.cos, &self.sin].map(|data| p.put(data)),
            norms: [norms.map(|n| &n.0), norms.map(|n| &n.1)].map(|norm| p.put_some(norm)),
            words: [&self.slots, &self.starts, &self.positions, &self.tables].map(|data| p.put(data)),
            sinks: p.put_some(self.sinks.as_ref()),
        }
    }
}

impl Given {
    pub fn args(&self, case: &Case) -> QkNormRope<'_> {
        let [qkv, cos, sin] = &self.floats;
        let [q_norm, k_norm] = &self.norms;
        QkNormRope {
            qkv: qkv.view(),
            q_norm: view_of(q_norm),
            k_norm: view_of(k_norm),
            eps: 1e-6,
            cos: cos.view(),
            sin: sin.view(),
            slot_mapping: self.words[0].view(),
            num_heads: case.heads.0,
            num_kv_heads: case.heads.1,
            head_dim: case.head_dim,
        }
    }

    pub fn meta(&self, case: &Case) -> AttentionMeta<'_> {
        let [_, starts, positions, tables] = &self.words;
        AttentionMeta {
            query_start_loc: starts.view(),
            positions: positions.view(),
            block_tables: tables.view(),
            scale: (case.head_dim as f32).powf(-0.5),
            sliding_window: case.window,
            sinks: view_of(&self.sinks),
            gates: case.gates.then(|| self.floats[0].view()),
        }
    }
}

impl Case {
    /// Rows of these heads with norms, and nothing else.
    pub fn new(heads: (usize, usize), head_dim: usize, block_size: usize, sequences: &[Sequence]) -> Self {
        let sequences = sequences.to_vec();
        let [sinks, gates] = [false; 2];
        Self { heads, head_dim, block_size, window: None, norms: true, sinks, gates, sequences, padding: 0 }
    }

    pub fn data(&self, rng: &mut Rng, model: DType, stream: DType) -> Data {
        let (hq, hkv) = self.heads;
        let d = self.head_dim;
        let bs = self.block_size;
        let used: usize = self.sequences.iter().map(|s| s.1).sum();
        let rows = used + self.padding;
        let max_blocks = self.sequences.iter().map(|s| (s.0 + s.1).div_ceil(bs)).max().unwrap_or(0).max(1);
        let num_blocks = self.sequences.len() * max_blocks + 2;
        // The blocks are in random order, and the padding of a table is not a valid block.
        let order = rng.permutation(num_blocks);
        let mut tables = Vec::new();
        let mut starts = vec![0];
        let mut positions = Vec::new();
        let mut slots = Vec::new();
        for (s, &(first, count)) in self.sequences.iter().enumerate() {
            let blocks = &order[s * max_blocks..(s + 1) * max_blocks];
            let needed = (first + count).div_ceil(bs);
            tables.extend(blocks.iter().enumerate().map(|(i, &b)| if i < needed { b } else { u32::MAX }));
            positions.extend(first as u32..(first + count) as u32);
            slots.extend((first..first + count).map(|p| blocks[p / bs] * bs as u32 + (p % bs) as u32));
            starts.push(positions.len() as u32);
        }
        positions.resize(rows, 0);
        slots.resize(rows, u32::MAX);
        let cache = [num_blocks, hkv, bs, d];
        Data {
            rows,
            qkv: rng.floats(stream, &[rows, (hq + 2 * hkv + if self.gates { hq } else { 0 }) * d]),
            norms: self.norms.then(|| (rng.floats(model, &[d]), rng.floats(model, &[d]))),
            cos: rng.floats(DType::F32, &[rows, d / 2]),
            sin: rng.floats(DType::F32, &[rows, d / 2]),
            slots: words(slots, &[rows]),
            caches: [rng.floats(model, &cache), rng.floats(model, &cache)],
            starts: words(starts, &[self.sequences.len() + 1]),
            positions: words(positions, &[rows]),
            tables: words(tables, &[self.sequences.len(), max_blocks]),
            sinks: self.sinks.then(|| sinks(hq)),
        }
    }

    pub fn step_rows(&self) -> StepRows {
        let decode = self.sequences.iter().take_while(|s| s.1 == 1).count();
        let scores = |sequences: &[Sequence]| {
            sequences
                .iter()
                .flat_map(|&(first, count)| first..first + count)
                .map(|position| position + 1)
                .sum()
        };
        let (decoding, prompts) = self.sequences.split_at(decode);
        StepRows { decode, decode_scores: scores(decoding), prompt_scores: scores(prompts) }
    }

    /// The form in which a step in bf16 runs.
    pub fn form(&self, machine: &Machine) -> Option<MixedForm> {
        let rows = self.step_rows();
        let decode = AttentionCall {
            rows: rows.decode,
            one_row_each: true,
            num_heads: self.heads.0,
            head_dim: self.head_dim,
            value_dim: self.head_dim,
            latent: false,
            sinks: false,
            gates: self.gates,
            dtype: DType::BF16,
            block_size: Some(self.block_size),
            aligned: true,
        };
        let prompts = AttentionCall { one_row_each: false, ..decode };
        let StepRows { decode_scores, prompt_scores, .. } = rows;
        let num_kv_heads = self.heads.1;
        MixedForm::choose(&MixedCall { decode, num_kv_heads, prompts, decode_scores, prompt_scores }, machine)
    }

    fn check(&self, rng: &mut Rng, model: DType, stream: DType) {
        self.check_data(&self.data(rng, model, stream), model, stream);
    }

    pub fn check_data(&self, data: &Data, model: DType, stream: DType) {
        let (hq, hkv) = self.heads;
        let d = self.head_dim;
        let op = |p: &mut Place| {
            let placed = data.placed(p);
            let args = placed.args(self);
            let meta = placed.meta(self);
            let mut k = p.put(&data.caches[0]);
            let mut v = p.put(&data.caches[1]);
            let mut q = p.out(stream, &[data.rows, hq, d]);
            qk_norm_rope_cache_into(&args, q.view_mut(), k.view_mut(), v.view_mut(), &mut p.ex)?;
            let mut out = p.out(model, &[data.rows, hq * d]);
            paged_attention_into(q.view(), k.view(), v.view(), &meta, out.view_mut(), &mut p.ex)?;
            let mut whole = p.out(model, &[data.rows, hq * d]);
            let rows = self.step_rows();
            let to = whole.view_mut();
            rope_attention_into(&args, &meta, rows, k.view_mut(), v.view_mut(), to, &mut p.ex)?;
            Ok(vec![q, k, v, out, whole])
        };
        on_both(op, |c, g| {
            let what = |part| {
                format!("{part} {hq}/{hkv} heads of {d} in {} with {}", model.as_str(), stream.as_str())
            };
            assert_close(&what("q"), &c[0], &g[0], 4e-6);
            assert_close(&what("k"), &c[1], &g[1], 4e-6);
            assert_same(&what("v"), &c[2], &g[2]);
            // The rounding of a key or of a tensor-core operand changes scores.
            let bound = 1e-5 + 12.0 * if model == DType::F32 { 0.0 } else { rounding(model) };
            assert_close(&what("attention"), &c[3], &g[3], bound);
            assert_close(&what("rope_attention"), &c[4], &g[4], bound);
        });
    }
}

/// Random sinks, from negligible to far above every score.
fn sinks(heads: usize) -> Buffer {
    let values: Vec<f32> = (0..heads).map(|head| [-300.0, 0.0, 1.5, 4.0, 120.0][head % 5]).collect();
    Buffer::from_vec(values, &[heads]).unwrap()
}

#[test]
fn attention_agrees_on_mixed_steps() {
    let mut rng = Rng::new();
    let mixed = vec![(0, 5), (37, 1), (0, 0), (128, 9), (0, 1), (300, 1)];
    let shapes = [
        ((1, 1), 2, 1, None, true),
        ((8, 2), 10, 5, Some(3), false),
        ((6, 6), 64, 16, None, true),
        ((20, 1), 96, 16, Some(130), true),
        ((24, 2), 256, 16, Some(40), true),
        ((32, 4), 128, 16, None, true),
        ((4, 2), 256, 7, None, false),
        ((3, 1), 18, 64, Some(1), true),
    ];
    for model in FLOATS {
        for stream in streams(model) {
            for (heads, head_dim, block_size, window, norms) in small(shapes, 64, |shape| shape.1) {
                let case = Case::new(heads, head_dim, block_size, &mixed);
                Case { window, norms, padding: 3, ..case }.check(&mut rng, model, stream);
            }
        }
    }
}

#[test]
fn attention_agrees_on_decoding_prefill_and_nothing() {
    let mut rng = Rng::new();
    let steps: [(Vec<Sequence>, usize); 9] = [
        (vec![(0, 150)], 0),
        // First decoding sequences, then prompts; also few rows, no rows, and padding.
        (vec![(37, 1), (0, 1), (1000, 1), (0, 200), (70, 3), (300, 1)], 0),
        (vec![(128, 1), (64, 90)], 5),
        (vec![(15, 1), (16, 1)], 3),
        (vec![(0, 300), (130, 70), (9, 1), (0, 2)], 2),
        (vec![(7, 1), (0, 1), (129, 1), (1000, 1), (63, 1), (64, 1)], 0),
        (vec![(5, 40), (200, 40)], 0),
        (vec![], 4),
        (vec![], 0),
    ];
    for model in FLOATS {
        for (sequences, padding) in &steps {
            let shapes = [((8, 1), 128), ((4, 4), 64), ((16, 2), 256), ((5, 1), 40)];
            for (heads, head_dim) in small(shapes, 40, |case| case.1) {
                for gates in [false, true] {
                    let case = Case::new(heads, head_dim, 16, sequences);
                    Case { gates, padding: *padding, ..case }.check(&mut rng, model, DType::F32);
                }
            }
        }
    }
}

#[test]
fn attention_agrees_where_prompts_overlap_many_decoding_rows() {
    let mut rng = Rng::new();
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    let uneven: Vec<Sequence> = (0..150).map(|i| (i * 371 % 1400, 1)).collect();
    for (prompts, padding, overlapped) in [
        (vec![], 5, false),
        (vec![(0, 130), (40, 3), (0, 1)], 3, true),
        (vec![(0, 3)], 0, true),
        (vec![(0, 2000)], 1, false),
    ] {
        let sequences: Vec<Sequence> = uneven.iter().copied().chain(prompts).collect();
        for (heads, head_dim) in [((32, 4), 128), ((32, 8), 64), ((16, 2), 256)] {
            let case = Case::new(heads, head_dim, 16, &sequences);
            let case = Case { gates: head_dim == 256, padding, ..case };
            assert_eq!(
                case.form(&machine) == Some(MixedForm::Overlapped),
                overlapped,
                "{:?} {heads:?}",
                case.step_rows()
            );
            case.check(&mut rng, DType::BF16, DType::F32);
        }
    }
}

/// Each kernel adds the sink of a head once to each denominator: in one block, in splits within a cluster and over
/// several, in prompts on warpgroup products alone and in pairs of blocks, and in the kernels of any shape.
#[test]
fn attention_agrees_with_sinks() {
    let mut rng = Rng::new();
    let steps: [(Vec<Sequence>, usize); 6] = [
        (vec![(0, 1), (37, 1), (700, 1), (9, 1)], 2),
        (vec![(3000, 1)], 0),
        (vec![(37, 1), (0, 1), (0, 200), (70, 3), (300, 130)], 3),
        (vec![(0, 700)], 0),
        (vec![(130, 1200)], 1),
        ((0..200).map(|i| (i * 37 % 600, 1)).collect(), 1),
    ];
    for model in [DType::BF16, DType::F32] {
        for (sequences, padding) in &steps {
            let shapes =
                [((16, 2), 64), ((64, 8), 64), ((8, 2), 128), ((5, 1), 64), ((8, 2), 256), ((6, 2), 20)];
            for (heads, head_dim) in shapes {
                for window in [None, Some(128), Some(1)] {
                    let case = Case::new(heads, head_dim, 16, sequences);
                    let padding = *padding;
                    Case { window, norms: false, sinks: true, padding, ..case }.check(
                        &mut rng,
                        model,
                        DType::F32,
                    );
                }
            }
        }
    }
}

/// Configs may have windows that are too large for 32 bits.
#[test]
fn attention_agrees_with_a_window_of_more_positions_than_there_are() {
    let mut rng = Rng::new();
    for sequences in [vec![(37, 1), (0, 1)], vec![(37, 1), (0, 90)]] {
        let heads = (8, 2);
        let head_dim = 128;
        let window = Some(1 << 31);
        let case = Case::new(heads, head_dim, 16, &sequences);
        Case { window, padding: 1, ..case }.check(&mut rng, DType::BF16, DType::F32);
    }
}

/// Memory after the end of a cache stays unchanged, whichever launch writes the rows. A decoding row without a slot is
/// padding.
#[test]
fn a_slot_beyond_the_cache_is_not_written() {
    let mut rng = Rng::new();
    let mut p = Place::new(cuda());
    let heads = (8, 2);
    let head_dim = 128;
    let case = Case::new(heads, head_dim, 16, &[(5, 1), (9, 1)]);
    let mut data = case.data(&mut rng, DType::BF16, DType::F32);
    let blocks = data.caches[0].dims()[0] - 1;
    let end = (blocks * case.block_size) as u32;
    data.slots = words(vec![end, end + 1], &[2]);
    let placed = data.placed(&p);
    let args = placed.args(&case);
    let meta = placed.meta(&case);
    let [mut k, mut v] = [&data.caches[0], &data.caches[1]].map(|cache| p.put(cache));
    for stream in [DType::F32, DType::BF16] {
        let mut q = p.out(stream, &[data.rows, heads.0, head_dim]);
        let [k, v] = [&mut k, &mut v].map(|cache| cache.view_mut().narrow(0, blocks).unwrap());
        qk_norm_rope_cache_into(&args, q.view_mut(), k, v, &mut p.ex).unwrap();
    }
    let mut out = p.out(DType::BF16, &[data.rows, heads.0 * head_dim]);
    let [k_cut, v_cut] = [&mut k, &mut v].map(|cache| cache.view_mut().narrow(0, blocks).unwrap());
    rope_attention_into(&args, &meta, case.step_rows(), k_cut, v_cut, out.view_mut(), &mut p.ex).unwrap();
    assert!(out.host(&p).view().to_f32_vec().unwrap().iter().all(|&x| x == 0.0), "padding is zero");
    for (before, after) in data.caches.iter().zip([&k, &v]) {
        assert_same("cache", before, &after.host(&p));
    }
}
