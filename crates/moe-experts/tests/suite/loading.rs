//! Checkpoints of both layouts give the same packs, whether they are loaded whole or in parts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use moe_experts::{ExpertWeights, LoadSpec};
use proptest::prelude::*;

use crate::reference::{dtypes, values};

type Tensors = HashMap<String, Tensor>;

const NAMES: [&str; 4] = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"];

/// Returns a checkpoint in the packed layout, in f32, under `experts.`.
fn packed(e: usize, h: usize, i: usize, seed: u64) -> Tensors {
    let dims = [vec![e, 2 * i, h], vec![e, h, i], vec![e, 2 * i], vec![e, h]];
    let tensor = |(n, dims): (usize, Vec<usize>)| {
        let v = values(dims.iter().product(), 1., seed ^ n as u64, DType::F32);
        let t = Tensor::from_vec(v, dims, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        (format!("experts.{}", NAMES[n]), t)
    };
    dims.into_iter().enumerate().map(tensor).collect()
}

/// Returns the same checkpoint with one tensor per expert and projection.
fn per_expert(packed: &Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (n, kind) in [(0, "weight"), (2, "bias")] {
        let gate_up = &packed[&format!("experts.{}", NAMES[n])];
        let down = &packed[&format!("experts.{}", NAMES[n + 1])];
        let i = gate_up.dims()[1] / 2;
        for e in 0..gate_up.dims()[0] {
            let expert = gate_up.get(e).unwrap();
            let mut put = |name: &str, t: Tensor| out.insert(format!("experts.{e}.{name}.{kind}"), t);
            put("gate_proj", expert.narrow(0, 0, i).unwrap());
            put("up_proj", expert.narrow(0, i, i).unwrap());
            put("down_proj", down.get(e).unwrap());
        }
    }
    out
}

/// Loads a checkpoint. It has biases only if `spec` has them.
fn load(tensors: &Tensors, spec: &LoadSpec, dtype: DType) -> Result<ExpertWeights> {
    load_all(&if spec.has_bias { tensors.clone() } else { without_biases(tensors) }, spec, dtype)
}

fn load_all(tensors: &Tensors, spec: &LoadSpec, dtype: DType) -> Result<ExpertWeights> {
    ExpertWeights::load(spec, VarBuilder::from_tensors(tensors.clone(), dtype, &Device::Cpu).pp("experts"))
}

fn without_biases(tensors: &Tensors) -> Tensors {
    tensors.iter().filter(|(name, _)| !name.contains("bias")).map(|(n, t)| (n.clone(), t.clone())).collect()
}

/// Returns the packs in f64: w13, w2, and the biases if there are any.
fn packs(w: &ExpertWeights) -> Vec<Tensor> {
    let packs = [w.w13(), w.w2()].map(|w| w.to_tensor().unwrap());
    let biases = [w.w13_bias(), w.w2_bias()];
    packs.iter().chain(biases.into_iter().flatten()).map(|t| t.to_dtype(DType::F64).unwrap()).collect()
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_same(a: &[Tensor], b: &[Tensor]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!((a.dims(), flat(a)), (b.dims(), flat(b)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn both_layouts_give_the_packs_of_the_local_experts(
        (e, h, i) in (1usize..6, 1usize..9, 1usize..9),
        picks in proptest::option::of(proptest::collection::vec(any::<prop::sample::Index>(), 0..8)),
        (bias, dtype, seed) in (any::<bool>(), dtypes(), any::<u64>()),
    ) {
        let checkpoint = packed(e, h, i, seed);
        let mut spec = LoadSpec::new(e, h, i).with_bias(bias);
        // These are any experts in any order, possibly with copies, possibly none.
        let ids: Vec<usize> = match &picks {
            None => (0..e).collect(),
            Some(picks) => picks.iter().map(|p| p.index(e)).collect(),
        };
        if picks.is_some() {
            spec = spec.with_local_experts(ids.clone());
        }
        let index = Tensor::new(ids.iter().map(|id| *id as u32).collect::<Vec<_>>(), &Device::Cpu).unwrap();
        let want: Vec<Tensor> = NAMES[..if bias { 4 } else { 2 }]
            .iter()
            .map(|n| {
                let whole = checkpoint[&format!("experts.{n}")].to_dtype(dtype).unwrap();
                match ids.len() {
                    0 => whole.narrow(0, 0, 0).unwrap(),
                    _ => whole.index_select(&index, 0).unwrap(),
                }
                .to_dtype(DType::F64).unwrap()
            })
            .collect();
        for tensors in [per_expert(&checkpoint), checkpoint] {
            let weights = load(&tensors, &spec, dtype).unwrap();
            prop_assert_eq!(weights.shape().dtype, dtype);
            assert_same(&packs(&weights), &want);
        }
    }

    #[test]
    fn tp_slices_concatenate_to_the_whole(
        (e, h, part, tp) in (1usize..4, 1usize..6, 1usize..5, 1usize..5),
        (dtype, seed) in (dtypes(), any::<u64>()),
    ) {
        let i = part * tp;
        let checkpoint = packed(e, h, i, seed);
        let spec = LoadSpec::new(e, h, i).with_bias(true);
        let whole = packs(&load(&checkpoint, &spec, dtype).unwrap());
        for tensors in [per_expert(&checkpoint), checkpoint] {
            let parts: Vec<Vec<Tensor>> = (0..tp)
                .map(|rank| packs(&load(&tensors, &spec.clone().with_tp(rank, tp), dtype).unwrap()))
                .collect();
            // Gate rows and up rows of the parts are concatenated separately, one after the other.
            let joined = |pack: usize, dim: usize, from: usize, len: usize| {
                let cut: Vec<Tensor> = parts.iter().map(|p| p[pack].narrow(dim, from, len).unwrap()).collect();
                Tensor::cat(&cut, dim).unwrap()
            };
            let gate_up = |pack| Tensor::cat(&[joined(pack, 1, 0, part), joined(pack, 1, part, part)], 1).unwrap();
            let got = [gate_up(0), joined(1, 2, 0, part), gate_up(2), parts[tp - 1][3].clone()];
            assert_same(&got, &whole);
        }
    }
}

/// A source of tensors that notes which tensors are read.
struct Counting(Tensors, Arc<Mutex<Vec<String>>>);

impl SimpleBackend for Counting {
    fn get(&self, s: Shape, name: &str, h: candle_nn::Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.1.lock().unwrap().push(name.to_string());
        SimpleBackend::get(&self.0, s, name, h, dtype, dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.0.get_unchecked(name, dtype, dev)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

#[test]
fn only_local_experts_are_read_and_each_tensor_once() -> Result<()> {
    let reads = Arc::new(Mutex::new(Vec::new()));
    let backend = Counting(without_biases(&per_expert(&packed(6, 3, 2, 1))), reads.clone());
    let vb = VarBuilder::from_backend(Box::new(backend), DType::BF16, Device::Cpu).pp("experts");
    ExpertWeights::load(&LoadSpec::new(6, 3, 2).with_local_experts(vec![5, 1]), vb)?;
    let mut reads = std::mem::take(&mut *reads.lock().unwrap());
    // One tensor is read first, so that wrong sizes are refused before anything is allocated.
    assert_eq!(reads.remove(0), "experts.1.gate_proj.weight");
    reads.sort();
    let want = [1, 5].map(|e| ["down", "gate", "up"].map(|p| format!("experts.{e}.{p}_proj.weight")));
    assert_eq!(reads, want.concat());
    Ok(())
}

#[test]
fn tensors_that_are_not_contiguous_load() -> Result<()> {
    let mut tensors = per_expert(&packed(2, 4, 3, 5));
    let want = packs(&load(&tensors, &LoadSpec::new(2, 4, 3), DType::F32)?);
    for t in tensors.values_mut().filter(|t| t.rank() == 2) {
        *t = t.t()?.contiguous()?.t()?;
    }
    assert_same(&packs(&load(&tensors, &LoadSpec::new(2, 4, 3), DType::F32)?), &want);
    Ok(())
}

#[test]
fn faults_name_the_tensor_and_both_shapes() {
    let refused =
        |tensors: &Tensors, spec: LoadSpec| load(tensors, &spec, DType::F32).unwrap_err().to_string();
    let spec = || LoadSpec::new(3, 4, 2);
    let whole = packed(3, 4, 2, 0);
    let mut lacking = per_expert(&whole);
    lacking.remove("experts.1.up_proj.weight");
    let mut packed_lacking = whole.clone();
    packed_lacking.remove("experts.down_proj");
    let mut other = per_expert(&whole);
    other.insert(
        "experts.0.down_proj.weight".into(),
        Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap(),
    );
    let each = per_expert(&whole);
    let no_bias = without_biases(&each);
    for (got, wants) in [
        (refused(&lacking, spec()), &["experts.1.up_proj.weight"][..]),
        (refused(&packed_lacking, spec()), &["experts.down_proj"]),
        (refused(&no_bias, spec().with_bias(true)), &["_proj.bias"]),
        (refused(&other, spec()), &["experts.0.down_proj.weight", "[4, 2]", "[2, 4]"]),
        (refused(&whole, LoadSpec::new(4, 4, 2)), &["gate_up_proj", "[4, 4, 4]", "[3, 4, 4]"]),
        (refused(&each, LoadSpec::new(4, 4, 2)), &["experts.3.gate_proj.weight"]),
        (
            refused(&each, spec().with_local_experts(vec![0, 3])),
            &["local expert 3 is not in the checkpoint; it has 3"],
        ),
        (refused(&each, spec().with_tp(2, 2)), &["expected tp_rank below tp_size, got rank 2 of 2"]),
        (refused(&each, spec().with_tp(0, 0)), &["got rank 0 of 0"]),
        (refused(&each, spec().with_tp(0, 3)), &["tp_size 3 does not divide the intermediate size 2"]),
        (refused(&each, LoadSpec::new(3, 0, 2)), &["of at least 1, got 3, 0, 2"]),
    ] {
        for want in wants {
            assert!(got.contains(want), "expected {want:?} in {got}");
        }
    }
    let e = load(&each, &spec(), DType::U32).unwrap_err().to_string();
    assert!(e.contains("expected dtype f32, bf16 or f16, got u32"), "{e}");
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_allocated() {
    let whole = packed(3, 4, 2, 0);
    let each = per_expert(&packed(3, 4, 2, 0));
    for spec in [
        LoadSpec::new(1 << 40, 4, 2),
        LoadSpec::new(3, 1 << 40, 2),
        LoadSpec::new(3, 4, 1 << 40),
        LoadSpec::new(usize::MAX, 4, 2),
        LoadSpec::new(usize::MAX, usize::MAX, usize::MAX),
    ] {
        for tensors in [&whole, &each] {
            assert!(load(tensors, &spec, DType::F32).is_err(), "{spec:?}");
        }
    }
}

/// If a source offers this rank's packs, nothing else is read from it.
#[test]
fn packs_of_a_rank_are_taken_as_they_are() -> Result<()> {
    let checkpoint = packed(3, 4, 6, 9);
    let spec = LoadSpec::new(3, 4, 6).with_local_experts(vec![2, 0]).with_tp(1, 2).with_bias(true);
    let want = load(&per_expert(&checkpoint), &spec, DType::F32)?;
    let names = ["w13", "w2", "w13_bias", "w2_bias"];
    let shown =
        names.into_iter().map(|name| format!("experts.{name}")).zip(packs(&want)).collect::<Tensors>();
    assert_same(&packs(&load(&shown, &spec, DType::F32)?), &packs(&want));
    let e = load(&shown, &spec.with_tp(0, 1), DType::F32).unwrap_err().to_string();
    assert!(e.contains("[2, 12, 4]") && e.contains("[2, 6, 4]"), "{e}");
    Ok(())
}

/// Biases, scales and experts that the spec does not have would change the results.
#[test]
fn what_is_not_read_is_refused_by_name() {
    let whole = packed(3, 4, 2, 0);
    let spec = LoadSpec::new(3, 4, 2);
    let each = per_expert(&whole);
    let refused = |tensors: &Tensors| load_all(tensors, &spec, DType::F32).unwrap_err().to_string();
    for (tensors, names) in [
        (&whole, ["experts.gate_up_proj_bias", "experts.down_proj_bias"]),
        (&each, ["experts.0.gate_proj.bias", "and 1 more"]),
    ] {
        let e = refused(tensors);
        assert!(names.iter().all(|name| e.contains(name)) && e.contains("with_bias"), "{e}");
        assert!(load_all(tensors, &spec.clone().with_bias(true), DType::F32).is_ok());
    }
    let whole = without_biases(&whole);
    let each = without_biases(&each);
    let with = |tensors: &Tensors, name: &str, value: f32| {
        let mut tensors = tensors.clone();
        tensors.insert(format!("experts.{name}"), Tensor::full(value, 4, &Device::Cpu).unwrap());
        tensors
    };
    for (tensors, name) in [
        (&whole, "down_proj_scale_inv"),
        (&whole, "0.gate_proj.weight"),
        (&each, "2.down_proj.bias"),
        (&each, "1.up_proj.weight_scale"),
        (&each, "3.gate_proj.weight"),
    ] {
        let e = refused(&with(tensors, name, 1.0));
        assert!(e.contains(&format!("experts.{name}")), "{name}: {e}");
    }
    assert!(load_all(&with(&each, "2.down_proj.bias", 0.0), &spec, DType::F32).is_ok());
}
