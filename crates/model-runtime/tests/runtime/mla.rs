//! Latent attention in both forms against its definition in f64 over whole sequences.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{
    Exec, KvCache, KvLayout, LogitsRows, Mixer, MixerIo, MlaAttention, MlaConfig, MlaForm, MlaNames, Rope,
    SequenceStep, Step,
};
use moe_comm::{ParallelConfig, RowParallel, run_ranks};
use moe_kernels::{Buffer, TensorView};
use proptest::prelude::*;

use crate::message;

const CPU: Device = Device::Cpu;

fn config() -> MlaConfig {
    MlaConfig {
        hidden_size: 15,
        num_heads: 3,
        q_lora_rank: Some(9),
        kv_lora_rank: 11,
        qk_nope_head_dim: 5,
        qk_rope_head_dim: 4,
        v_head_dim: 6,
        bias: true,
        norm_eps: 1e-6,
        softmax_scale: 0.4,
        form: MlaForm::Absorbed,
    }
}

type Weights = HashMap<String, Tensor>;

fn weights(c: &MlaConfig) -> Weights {
    let h = c.hidden_size;
    let heads = c.num_heads;
    let query = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim);
    let latent = c.kv_lora_rank + c.qk_rope_head_dim;
    let mut shapes = vec![
        ("kv_a_proj_with_mqa.weight", vec![latent, h]),
        ("kv_a_layernorm.weight", vec![c.kv_lora_rank]),
        ("kv_b_proj.weight", vec![heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank]),
        ("o_proj.weight", vec![h, heads * c.v_head_dim]),
    ];
    match c.q_lora_rank {
        None => shapes.push(("q_proj.weight", vec![query, h])),
        Some(rank) => shapes.extend([
            ("q_a_proj.weight", vec![rank, h]),
            ("q_a_layernorm.weight", vec![rank]),
            ("q_b_proj.weight", vec![query, rank]),
        ]),
    }
    if c.bias {
        shapes.extend([("kv_a_proj_with_mqa.bias", vec![latent]), ("o_proj.bias", vec![h])]);
        shapes.extend(c.q_lora_rank.map(|rank| ("q_a_proj.bias", vec![rank])));
    }
    let pseudo = |seed: usize, n: usize| -> Vec<f32> {
        (0..n).map(|i| (((i + 1) * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
    };
    let tensor = |(seed, (name, dims)): (usize, (&str, Vec<usize>))| {
        (name.to_string(), Tensor::from_vec(pseudo(seed, dims.iter().product()), dims, &CPU).unwrap())
    };
    shapes.into_iter().enumerate().map(tensor).collect()
}

fn load(c: &MlaConfig, weights: &Weights, dtype: DType) -> Result<MlaAttention> {
    let vb = VarBuilder::from_tensors(weights.clone(), dtype, &CPU);
    MlaAttention::load(c.clone(), MlaNames::default(), vb)
}

/// The definition, sequence by sequence: every key and value of every head written out.
struct Defined<'a>(&'a MlaConfig, &'a Weights);

impl Defined<'_> {
    fn get(&self, name: &str) -> Option<Vec<f64>> {
        let values = self.1.get(name)?.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        Some(values.into_iter().map(f64::from).collect())
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.get(&format!("{name}.weight")).unwrap();
        let bias = self.get(&format!("{name}.bias"));
        let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        w.chunks(x.len()).enumerate().map(|(i, w)| dot(w) + bias.as_ref().map_or(0.0, |b| b[i])).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.get(&format!("{name}.weight")).unwrap();
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + self.0.norm_eps).sqrt();
        x.iter().zip(w).map(|(x, w)| x / rms * w).collect()
    }

    /// Neighbours rotate together.
    fn rotate(x: &[f64], position: usize) -> Vec<f64> {
        let r = x.len();
        (0..r)
            .map(|i| {
                let angle = position as f64 / 10000f64.powf((i / 2 * 2) as f64 / r as f64);
                let other = if i % 2 == 0 { -x[i + 1] } else { x[i - 1] };
                x[i] * angle.cos() + other * angle.sin()
            })
            .collect()
    }

    /// Keys and values of all heads.
    fn key_values(&self, x: &[f64], position: usize) -> Vec<(Vec<f64>, Vec<f64>)> {
        let c = self.0;
        let down = self.linear("kv_a_proj_with_mqa", x);
        let (latent, rope) = down.split_at(c.kv_lora_rank);
        let up = self.linear("kv_b_proj", &self.norm("kv_a_layernorm", latent));
        let rope = Self::rotate(rope, position);
        let heads = up.chunks(c.qk_nope_head_dim + c.v_head_dim).map(|head| {
            let (k, v) = head.split_at(c.qk_nope_head_dim);
            ([k, &rope].concat(), v.to_vec())
        });
        heads.collect()
    }

    fn queries(&self, x: &[f64], position: usize) -> Vec<Vec<f64>> {
        let c = self.0;
        let q = match c.q_lora_rank {
            None => self.linear("q_proj", x),
            Some(_) => self.linear("q_b_proj", &self.norm("q_a_layernorm", &self.linear("q_a_proj", x))),
        };
        let heads = q.chunks(c.qk_nope_head_dim + c.qk_rope_head_dim).map(|head| {
            let (nope, rope) = head.split_at(c.qk_nope_head_dim);
            [nope, &Self::rotate(rope, position)].concat()
        });
        heads.collect()
    }

    fn outputs(&self, xs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let cached: Vec<_> = xs.iter().enumerate().map(|(p, x)| self.key_values(x, p)).collect();
        let row = |(p, x): (usize, &Vec<f64>)| {
            let mut attended = Vec::new();
            for (head, q) in self.queries(x, p).iter().enumerate() {
                let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
                let weights: Vec<f64> = cached[..=p]
                    .iter()
                    .map(|token| (dot(&token[head].0) * self.0.softmax_scale).exp())
                    .collect();
                let total: f64 = weights.iter().sum();
                attended.extend((0..self.0.v_head_dim).map(|i| {
                    cached.iter().zip(&weights).map(|(token, w)| w / total * token[head].1[i]).sum::<f64>()
                }));
            }
            self.linear("o_proj", &attended)
        };
        xs.iter().enumerate().map(row).collect()
    }
}

/// The layer's outputs for one sequence that comes in steps of `chunk` rows.
fn run(layer: &MlaAttention, xs: &Tensor, chunk: usize, block_size: usize) -> Result<Vec<f32>> {
    let len = xs.dims2()?.0;
    let c = layer.config();
    let rope = Rope::new(
        RopeConfig::from_config(&Config::parse("{}", "c").unwrap(), c.qk_rope_head_dim, 4096).unwrap(),
    );
    let mut kv = KvCache::new(&c.kv_layout(xs.dtype()).layers(1), len.div_ceil(block_size) + 1, block_size)?;
    let blocks: Vec<u32> = (0..len.div_ceil(block_size) as u32).rev().collect();
    let ids = vec![0u32; len];
    let mut out = Vec::new();
    let mut ex = Exec::cpu();
    for start in (0..len).step_by(chunk) {
        let rows = chunk.min(len - start);
        let step = Step::new(
            [SequenceStep {
                token_ids: &ids[..rows],
                start,
                prompt_len: len,
                blocks: &blocks,
                logits: LogitsRows::None,
                scored: &[],
            }],
            block_size,
        )?;
        let step = step.views()?;
        let x = xs.narrow(0, start, rows)?.force_contiguous()?;
        let angles = rope.rows(step.positions, step.rope_len, &mut ex)?;
        let mut part = Buffer::zeros(DType::F32, x.dims())?;
        let x = TensorView::new(&x)?;
        let io = MixerIo::Store { x: x.view()?.into(), out: part.view_mut() };
        layer.forward_into(io, &step, &angles, kv.layer_mut(0)?, &mut ex)?;
        out.extend(part.view().to_f32_vec()?);
    }
    Ok(out)
}

fn inputs(len: usize, hidden: usize) -> Vec<Vec<f64>> {
    let x = |p: usize, i: usize| ((p * 31 + i * 17 + 5) % 64) as f64 / 32.0 - 1.0;
    (0..len).map(|p| (0..hidden).map(|i| x(p, i)).collect()).collect()
}

fn rows(xs: &[Vec<f64>], dtype: DType) -> Result<Tensor> {
    let flat: Vec<f32> = xs.iter().flatten().map(|x| *x as f32).collect();
    Tensor::from_vec(flat, (xs.len(), xs[0].len()), &CPU)?.to_dtype(dtype)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Both forms are the definition, and their bits do not depend on chunks or blocks.
    #[test]
    fn both_forms_are_the_definition(
        heads in 1usize..4, rank in proptest::option::of(1usize..12), latent in 1usize..20,
        nope in 1usize..8, half in 1usize..4, value in 1usize..9, hidden in 1usize..20, bias: bool,
        len in 1usize..80, chunk in 1usize..90, block_size in 1usize..40,
    ) {
        let c = MlaConfig {
            hidden_size: hidden, num_heads: heads, q_lora_rank: rank, kv_lora_rank: latent,
            qk_nope_head_dim: nope, qk_rope_head_dim: 2 * half, v_head_dim: value, bias, ..config()
        };
        let weights = weights(&c);
        let xs = inputs(len, hidden);
        let want = Defined(&c, &weights).outputs(&xs).concat();
        let xs = rows(&xs, DType::F32).unwrap();
        for form in [MlaForm::Absorbed, MlaForm::Naive] {
            let layer = load(&MlaConfig { form, ..c.clone() }, &weights, DType::F32).unwrap();
            let bulk = run(&layer, &xs, len, 16).unwrap();
            for (i, (got, want)) in bulk.iter().zip(&want).enumerate() {
                prop_assert!((*got as f64 - want).abs() < 2e-4 * (1.0 + want.abs()), "{form:?} {i}: {got} {want}");
            }
            prop_assert_eq!(run(&layer, &xs, chunk, block_size).unwrap(), bulk);
        }
    }
}

#[test]
fn bf16_caches_stay_near_the_definition_and_keep_their_bits() -> Result<()> {
    let c = config();
    let len = 70;
    let exact = |t: &Tensor| t.to_dtype(DType::BF16)?.to_dtype(DType::F32);
    let weights: Weights =
        weights(&c).iter().map(|(name, t)| Ok((name.clone(), exact(t)?))).collect::<Result<_>>()?;
    let xs = inputs(len, c.hidden_size);
    let want = Defined(&c, &weights).outputs(&xs).concat();
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    for form in [MlaForm::Absorbed, MlaForm::Naive] {
        let layer = load(&MlaConfig { form, ..c.clone() }, &weights, DType::BF16)?;
        let bulk = run(&layer, &rows(&xs, DType::BF16)?, len, 16)?;
        let difference = norm(&mut bulk.iter().zip(&want).map(|(a, b)| *a as f64 - b));
        assert!(difference < 1e-2 * norm(&mut want.iter().copied()), "{form:?}: {difference}");
        assert_eq!(run(&layer, &rows(&xs, DType::BF16)?, 1, 3)?, bulk, "{form:?}: decode is prefill");
    }
    Ok(())
}

/// Each rank has some heads; all cache the same latent rows, or the keys and values of their heads.
#[test]
fn ranks_that_share_the_heads_have_the_bits_of_one() -> Result<()> {
    for (rank, dtype) in [(Some(9), DType::F32), (None, DType::BF16)] {
        let c = MlaConfig { num_heads: 4, q_lora_rank: rank, ..config() };
        let weights = weights(&c);
        let xs = rows(&inputs(21, c.hidden_size), dtype)?;
        for form in [MlaForm::Absorbed, MlaForm::Naive] {
            let c = MlaConfig { form, ..c.clone() };
            let want = run(&load(&c, &weights, dtype)?, &xs, 5, 4)?;
            for tp in [2, 4] {
                let parallel = ParallelConfig { tp, ..ParallelConfig::default() };
                let results = run_ranks(tp, |rank, comm| {
                    let geometry = parallel.geometry(rank)?;
                    let heads = geometry.attention_heads(4, 4)?.heads;
                    let cut = |name: &str, tensor: &Tensor| {
                        let width = |rows: usize| heads.start * rows / 4..heads.end * rows / 4;
                        match name {
                            "q_proj.weight" | "q_b_proj.weight" | "kv_b_proj.weight" => {
                                let held = width(tensor.dims()[0]);
                                tensor.narrow(0, held.start, held.len())
                            }
                            "o_proj.weight" => {
                                let held = width(tensor.dims()[1]);
                                tensor.narrow(1, held.start, held.len())?.contiguous()
                            }
                            _ => Ok(tensor.clone()),
                        }
                    };
                    let part: Weights =
                        weights.iter().map(|(n, t)| Ok((n.clone(), cut(n, t)?))).collect::<Result<_>>()?;
                    let shard = geometry.row_shard("heads", 4 * c.v_head_dim)?;
                    let ranks = RowParallel::new(&shard, Arc::new(comm))?;
                    let layer = load(&c.clone().with_heads(heads.len()), &part, dtype)?;
                    run(&layer.with_row_parallel(ranks), &xs, 5, 4)
                });
                for got in results {
                    assert!(got? == want, "{form:?} {dtype:?} over {tp} ranks");
                }
            }
        }
    }
    Ok(())
}

/// DeepSeek-V2's sizes: 2 x (512 + 64) bytes per token and layer in the absorbed form.
#[test]
fn the_absorbed_cache_holds_one_latent_row() -> Result<()> {
    let v2 = MlaConfig {
        num_heads: 128,
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        ..config()
    };
    let layout = v2.kv_layout(DType::BF16);
    assert_eq!(layout.layers(60).bytes_per_token()?, 60 * 2 * (512 + 64));
    let mut kv = KvCache::new(&layout.layers(1), 3, 16)?;
    let layer = kv.layer_mut(0)?.paged()?;
    assert_eq!((layer.k().dims(), layer.v().dims()), (&[3, 1, 16, 576][..], &[3, 1, 16, 576][..]));
    assert!(layer.kv_mut().1.is_none(), "values have no memory of their own");
    let naive = MlaConfig { form: MlaForm::Naive, ..v2 }.kv_layout(DType::BF16);
    let want = KvLayout { num_kv_heads: 128, head_dim: 192, value_dim: Some(128), dtype: DType::BF16 };
    assert_eq!(naive, want);
    assert_eq!(naive.layers(60).bytes_per_token()?, 60 * 128 * 2 * (192 + 128));
    Ok(())
}

#[test]
fn wrong_sizes_and_missing_tensors_are_named() {
    let refused = |c: MlaConfig, words: &str| {
        let e = message(load(&c, &weights(&config()), DType::F32));
        assert!(e.contains(words), "expected {words:?} in {e:?}");
    };
    assert!(load(&config(), &weights(&config()), DType::F32).is_ok());
    refused(MlaConfig { qk_rope_head_dim: 3, ..config() }, "even qk_rope_head_dim, got 3");
    refused(MlaConfig { v_head_dim: 0, ..config() }, "v_head_dim of at least 1, got 0");
    refused(MlaConfig { kv_lora_rank: 0, ..config() }, "kv_lora_rank of at least 1, got 0");
    refused(MlaConfig { q_lora_rank: None, ..config() }, "q_proj.weight");
    refused(MlaConfig { kv_lora_rank: 12, ..config() }, "kv_a_proj_with_mqa.weight");
    assert_eq!("naive".parse(), Ok(MlaForm::Naive));
    assert!("folded".parse::<MlaForm>().unwrap_err().contains("\"folded\"; expected absorbed or naive"));
}

#[test]
fn tensors_of_other_latent_attention_are_refused() {
    for (c, names) in [
        (MlaConfig { bias: false, ..config() }, ["o_proj.bias", "q_a_proj.bias", "q_proj.weight"]),
        (
            MlaConfig { q_lora_rank: None, ..config() },
            ["q_a_proj.weight", "q_b_proj.weight", "kv_b_proj.bias"],
        ),
    ] {
        for name in names {
            let mut weights = weights(&c);
            weights.insert(name.to_string(), Tensor::ones(3, DType::F32, &CPU).unwrap());
            let e = message(load(&c, &weights, DType::F32));
            assert!(e.contains(name) && e.contains("does not read"), "{name}: {e}");
        }
    }
}
