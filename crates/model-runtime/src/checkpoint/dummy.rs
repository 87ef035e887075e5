//! Random weights in the place of a checkpoint, for benchmarks.
//!
//! An element depends on (seed, tensor name, index) alone: not on the number of threads, nor on
//! the order in which tensors are asked for. Four elements share one 64-bit hash; each takes 16
//! of its bits through a table of normal quantiles, which costs about a nanosecond an element.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use moe_kernels::names::DeltaNames;
use moe_kernels::quant::QuantPart;
use moe_kernels::{Float, QuantScheme, with_float};
use moe_quant::QuantConfig;
use rayon::prelude::*;

use super::dummy_quant::{STD, random_part};
use super::slice::{SliceSource, TensorSlice, check_ranges};
use super::spec::TensorSpec;
#[cfg(feature = "cuda")]
use super::stages::Stages;
use crate::hash::{GOLDEN, fnv1a, mix};

/// Elements per parallel task; a multiple of the four that share a hash.
const CHUNK: usize = 1 << 18;

/// Random weights for a list of tensors: normal with mean 0 and deviation 0.02, except that
/// rank-1 tensors whose name contains `norm` are ones, and that the decays of linear
/// attention have the values with which a training starts.
///
/// It has only the tensors that it is given, so a loader that looks for optional tensors finds the ones in the list.
pub struct DummyWeights {
    seed: u64,
    shapes: HashMap<String, Vec<usize>>,
    /// Which matrices are quantised, and how.
    quantisation: Option<QuantConfig>,
    /// The dtype that holds every value; `None`: each dtype that is asked for.
    stored: Option<DType>,
    #[cfg(feature = "cuda")]
    stages: Stages,
}

impl DummyWeights {
    /// Random weights of these names and shapes.
    pub fn new(specs: impl IntoIterator<Item = TensorSpec>, seed: u64) -> Self {
        Self {
            seed,
            shapes: specs.into_iter().map(|s| (s.name, s.shape)).collect(),
            quantisation: None,
            stored: None,
            #[cfg(feature = "cuda")]
            stages: Stages::default(),
        }
    }

    /// These weights, but with random integers or FP8 in the matrices that a header calls quantised. A loader that asks
    /// for such a matrix in floats gets random floats.
    #[must_use]
    pub fn with_quantisation(self, quantisation: Option<QuantConfig>) -> Self {
        Self { quantisation, ..self }
    }

    /// These weights as a checkpoint in `dtype` has them: a loader that asks for f32 gets the values of that dtype,
    /// widened. Otherwise they would have all digits of f32, and a gate that keeps its digits would be held in f32.
    #[must_use]
    pub fn with_stored_dtype(self, dtype: DType) -> Self {
        Self { stored: Some(dtype), ..self }
    }

    /// How the matrix of a module is quantised, with its dims; `None`: it is a tensor of floats.
    fn quantised_matrix(&self, module: &str) -> Result<Option<(QuantScheme, [usize; 2])>> {
        let shape = self.shapes.get(&format!("{module}.weight"));
        let (Some(config), Some(&[n, k])) = (&self.quantisation, shape.map(Vec::as_slice)) else {
            return Ok(None);
        };
        let scheme = config.scheme_of(module)?;
        Ok((scheme != QuantScheme::NONE).then_some((scheme, [n, k])))
    }

    /// A [`VarBuilder`] at the root of the checkpoint, in dtype f32, bf16 or f16.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    fn shape(&self, name: &str) -> Result<&[usize]> {
        match self.shapes.get(name) {
            Some(shape) => Ok(shape),
            None => bail!("tensor `{name}` is not in the list of dummy weights"),
        }
    }

    /// bf16 matrices are made on a CUDA device itself, where numbers are uniform with the same
    /// deviation; everything else comes from the host.
    fn generate_on(&self, device: &Device, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if let Some(stored) = self.stored.filter(|stored| *stored != dtype) {
            return self.generate(name, shape, stored)?.to_dtype(dtype)?.to_device(device);
        }
        #[cfg(feature = "cuda")]
        if device.is_cuda() && dtype == DType::BF16 && shape.len() > 1 {
            let mut out = moe_kernels::Buffer::unspecified_on(device, dtype, shape)?;
            let key = mix(self.seed ^ mix(fnv1a(name.as_bytes())));
            let bound = (STD * 3f64.sqrt()) as f32;
            let ex = moe_kernels::Exec::on(device)?;
            moe_kernels::cuda::fill_random_into(out.view_mut(), key, 0, bound, &ex)?;
            return out.into_tensor();
        }
        self.generate(name, shape, dtype)?.to_device(device)
    }

    /// A part of what [`generate_on`](Self::generate_on) makes on a device; `None` where the host makes it.
    #[cfg(feature = "cuda")]
    fn generate_part_on(
        &self,
        device: &Device,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let shape = self.shape(name)?;
        if !device.is_cuda() || dtype != DType::BF16 || !(2..=3).contains(&shape.len()) {
            return Ok(None);
        }
        let dims: Vec<usize> = ranges.iter().map(|range| range.len()).collect();
        let mut out = moe_kernels::Buffer::unspecified_on(device, dtype, &dims)?;
        let key = mix(self.seed ^ mix(fnv1a(name.as_bytes())));
        let bound = (STD * 3f64.sqrt()) as f32;
        let ex = moe_kernels::Exec::on(device)?;
        moe_kernels::cuda::fill_random_box_into(out.view_mut(), shape, ranges, key, bound, &ex)?;
        out.into_tensor().map(Some)
    }

    /// [`generate_part_on`](Self::generate_part_on) for several parts, one after the other in one tensor.
    #[cfg(feature = "cuda")]
    fn generate_parts_on(
        &self,
        device: &Device,
        parts: &[TensorSlice],
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let part = |p: &TensorSlice| {
            let made = self.generate_part_on(device, &p.stored, &p.ranges, dtype)?;
            made.map(|tensor| tensor.flatten_all()).transpose()
        };
        let made = parts.iter().map(part).collect::<Result<Option<Vec<_>>>>()?;
        made.map(|tensors| Tensor::cat(&tensors, 0)).transpose()
    }

    fn generate(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if shape.len() == 1 && name.contains("norm") {
            return Tensor::ones(shape, dtype, &Device::Cpu);
        }
        if let (Some(values), [heads]) = (decay_values(name), shape) {
            return Tensor::from_iter((0..*heads).map(|head| values(head, *heads)), &Device::Cpu)?
                .to_dtype(dtype);
        }
        let key = mix(self.seed ^ mix(fnv1a(name.as_bytes())));
        let Some(len) = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) else {
            bail!("the shape {shape:?} of dummy weight `{name}` overflows")
        };
        with_float!(dtype, format!("dummy weight `{name}`"), T => {
            Tensor::from_vec(sample::<T>(len, key), shape, &Device::Cpu)
        })
    }
}

/// The values of a tensor that determines how fast the states of linear attention decay, as a function of the head and
/// the number of heads. They are the values with which transformers starts a training: a bias of 1, and rates from 0.01
/// to 16, here evenly spread. Random values would make all heads alike.
fn decay_values(name: &str) -> Option<fn(usize, usize) -> f32> {
    match name.rsplit('.').next() {
        Some(last) if last == DeltaNames::QWEN.a_log => {
            Some(|head, heads| (0.01 + 15.99 * (head as f32 + 0.5) / heads as f32).ln())
        }
        Some(last) if last == DeltaNames::QWEN.dt_bias => Some(|_, _| 1.0),
        _ => None,
    }
}

impl SliceSource for DummyWeights {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(part) = self.generate_part_on(device, name, ranges, dtype)? {
            return Ok(part);
        }
        part_of(&self.get_unchecked(name, dtype, &Device::Cpu)?, name, ranges)?.to_device(device)
    }

    #[cfg(feature = "cuda")]
    fn staging(&self, device: &Device) -> Result<Option<std::sync::Arc<moe_kernels::cuda::Staging>>> {
        self.stages.of(device, usize::MAX).map(Some)
    }

    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        Ok(self.quantised_matrix(module)?.map_or(QuantScheme::NONE, |(scheme, _)| scheme))
    }

    fn quantised(&self, module: &str, ranges: Option<&[Range<usize>]>) -> Result<Option<QuantPart<'_>>> {
        let Some((scheme, dims)) = self.quantised_matrix(module)? else { return Ok(None) };
        random_part((module, mix(self.seed ^ mix(fnv1a(module.as_bytes())))), scheme, dims, ranges).map(Some)
    }

    /// On CUDA each part is made on the device. Elsewhere, consecutive parts of one tensor share its generation.
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(made) = self.generate_parts_on(device, parts, dtype)? {
            return Ok(made);
        }
        let of_one = |of_one: &[TensorSlice]| {
            let name = &of_one[0].stored;
            let whole = self.get_unchecked(name, dtype, device)?;
            let part = |p: &TensorSlice| part_of(&whole, name, &p.ranges)?.flatten_all();
            Tensor::cat(&of_one.iter().map(part).collect::<Result<Vec<_>>>()?, 0)
        };
        let tensors = parts.chunk_by(|a, b| a.stored == b.stored).map(of_one);
        Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)
    }
}

/// A copy of a part of a tensor.
fn part_of(tensor: &Tensor, name: &str, ranges: &[Range<usize>]) -> Result<Tensor> {
    check_ranges(name, ranges, tensor.dims())?;
    let narrow =
        |tensor: Tensor, (dim, range): (usize, &Range<usize>)| tensor.narrow(dim, range.start, range.len());
    ranges.iter().enumerate().try_fold(tensor.clone(), narrow)?.contiguous()
}

impl SimpleBackend for DummyWeights {
    fn get(&self, s: Shape, name: &str, _: candle_nn::Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let shape = self.shape(name)?;
        if shape != s.dims() {
            bail!("dummy weight `{name}`: expected shape {:?}, got {shape:?}", s.dims())
        }
        self.generate_on(dev, name, shape, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.generate_on(dev, name, self.shape(name)?, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.shapes.contains_key(name)
    }
}

/// `len` normal samples.
fn sample<T: Float>(len: usize, key: u64) -> Vec<T> {
    let table: Vec<T> = quantiles().map(|z| T::from_f64(z * STD)).collect();
    let mut out = T::zeros(len);
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
        let first = (chunk * CHUNK / 4) as u64;
        for (hash, four) in (first..).zip(out.chunks_mut(4)) {
            let bits = mix(key.wrapping_add(hash.wrapping_mul(GOLDEN)));
            for (j, o) in four.iter_mut().enumerate() {
                // The table has an entry for each value of 16 bits.
                *o = table[(bits >> (16 * j)) as u16 as usize];
            }
        }
    });
    out
}

/// Quantiles of the standard normal distribution at the midpoints of 2^16 equal parts.
fn quantiles() -> impl Iterator<Item = f64> {
    (0..1u32 << 16).map(|i| normal_quantile((i as f64 + 0.5) / (1u32 << 16) as f64))
}

/// Inverse of the normal distribution function: Acklam's rational approximation (relative error
/// below 1.2e-9, P. J. Acklam 2003).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e+01,
        2.209460984245205e+02,
        -2.759285104469687e+02,
        1.383_577_518_672_69e2,
        -3.066479806614716e+01,
        2.506628277459239e+00,
    ];
    const B: [f64; 6] = [
        -5.447609879822406e+01,
        1.615858368580409e+02,
        -1.556989798598866e+02,
        6.680131188771972e+01,
        -1.328068155288572e+01,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e+00,
        -2.549732539343734e+00,
        4.374664141464968e+00,
        2.938163982698783e+00,
    ];
    const D: [f64; 5] =
        [7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00, 1.0];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |acc, c| acc * x + c);
    let tail = |p: f64| {
        let q = (-2.0 * p.ln()).sqrt();
        poly(&C, q) / poly(&D, q)
    };
    const LOW: f64 = 0.02425;
    if p < LOW {
        tail(p)
    } else if p > 1.0 - LOW {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        poly(&A, r) * q / poly(&B, r)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn weights(name: &str, shape: &[usize], seed: u64, dtype: DType) -> Result<Tensor> {
        DummyWeights::new([TensorSpec::new(name, shape)], seed)
            .var_builder(dtype, &Device::Cpu)
            .get(shape, name)
    }

    #[test]
    fn samples_are_normal() -> Result<()> {
        let n = 1 << 20;
        let x = weights("w", &[n], 0, DType::F32)?.to_vec1::<f32>()?;
        let moment = |k: i32| x.iter().map(|&x| (x as f64 / STD).powi(k)).sum::<f64>() / n as f64;
        // Standard errors of the first four moments of 2^20 normal samples: 0.001 to 0.01.
        for (k, want, tolerance) in [(1, 0.0, 0.005), (2, 1.0, 0.007), (3, 0.0, 0.02), (4, 3.0, 0.05)] {
            assert!((moment(k) - want).abs() < tolerance, "moment {k}: {}", moment(k));
        }
        // Neighbours that share a hash are not correlated.
        let lag = x.windows(2).map(|w| (w[0] * w[1]) as f64).sum::<f64>() / (n as f64 * STD * STD);
        assert!(lag.abs() < 0.005, "{lag}");
        Ok(())
    }

    #[test]
    fn an_element_depends_on_seed_name_and_index_alone() -> Result<()> {
        let long = weights("a", &[CHUNK + 9], 1, DType::F32)?.to_vec1::<f32>()?;
        let short = weights("a", &[7], 1, DType::F32)?.to_vec1::<f32>()?;
        assert_eq!(long[..7], short);
        assert_ne!(weights("b", &[7], 1, DType::F32)?.to_vec1::<f32>()?, short);
        assert_ne!(weights("a", &[7], 2, DType::F32)?.to_vec1::<f32>()?, short);
        let half = weights("a", &[7], 1, DType::BF16)?.to_vec1::<bf16>()?;
        let rounded: Vec<bf16> = short.iter().map(|&x| bf16::from_f32(x)).collect();
        assert_eq!(half, rounded);
        Ok(())
    }

    #[test]
    fn weights_that_are_stored_in_bf16_have_its_digits_in_f32() -> Result<()> {
        let stored = |dtype| -> Result<Vec<f32>> {
            let weights = DummyWeights::new([TensorSpec::new("a", &[9])], 1).with_stored_dtype(dtype);
            weights.var_builder(DType::F32, &Device::Cpu).get(9, "a")?.to_vec1()
        };
        let wide = weights("a", &[9], 1, DType::F32)?.to_vec1::<f32>()?;
        let narrow: Vec<f32> = wide.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_ne!(narrow, wide);
        assert_eq!((stored(DType::BF16)?, stored(DType::F32)?), (narrow, wide));
        Ok(())
    }

    #[test]
    fn norms_are_ones_and_the_list_is_law() -> Result<()> {
        let specs = [TensorSpec::new("model.norm.weight", &[3]), TensorSpec::new("w", &[2, 2])];
        let vb = DummyWeights::new(specs, 0).var_builder(DType::F32, &Device::Cpu);
        assert_eq!(vb.get(3, "model.norm.weight")?.to_vec1::<f32>()?, [1.0; 3]);
        assert!(vb.contains_tensor("w") && !vb.contains_tensor("v"));
        let e = vb.get((2, 3), "w").map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("expected shape [2, 3], got [2, 2]"), "{e}");
        let e = vb.get(1, "v").map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("`v` is not in the list"), "{e}");
        Ok(())
    }

    #[test]
    fn quantiles_invert_the_normal_distribution() {
        for (p, z) in [(0.5, 0.0), (0.975, 1.959963985), (0.001, -3.090232306), (0.9999, 3.719016485)] {
            assert!((normal_quantile(p) - z).abs() < 1e-7, "{p}");
        }
    }
}
